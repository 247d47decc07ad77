"""Play the situations one after the other on a throw-away server, and check that each went as it should.

    run.py [SITUATION ...]    all, or those named: daily_report, leader, create_user, migrate, who_holds_it, job_queue,
                              reconnect, paused_holder, leader_lease

NAMED_LOCKS_PG_BIN    the folder with initdb and postgres, of a server in which the extension is installed
NAMED_LOCKS_RUNAS     for root only: the OS user to run the server as
"""

from __future__ import annotations

import os
import signal
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import create_user
import daily_report
import job_queue
import leader
import leader_lease
import migrate
import paused_holder
import reconnect
import who_holds_it
from server import Server, ServerError, throwaway_server
from stage import Checks

if TYPE_CHECKING:
    from types import ModuleType

SITUATIONS = {
    situation.__name__: situation
    for situation in (
        daily_report,
        leader,
        create_user,
        migrate,
        who_holds_it,
        job_queue,
        reconnect,
        paused_holder,
        leader_lease,
    )
}


def play(situation: ModuleType, server: Server) -> Checks:
    """Play one; whatever breaks it off is a failed check."""
    print(f"\n{(situation.__doc__ or '').splitlines()[0]}")
    try:
        checks: Checks = situation.demo(server)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        checks = Checks()
        checks.that(False, "it ended as planned", f"{type(error).__name__}: {error}")
    return checks


def play_all(server: Server, situations: list[ModuleType]) -> bool:
    """Play them; True if every check was passed."""
    begin = time.monotonic()
    with server.connect("demo") as conn:
        [(server_version, version)] = conn.execute(
            """SELECT current_setting('server_version'), extversion
                 FROM pg_extension WHERE extname = 'named_locks'"""
        )
    print(f"PostgreSQL {server_version}, named_locks {version}, {server.conninfo}")
    results = [play(situation, server) for situation in situations]
    failed = sum(checks.failed for checks in results)
    passed = sum(checks.passed for checks in results)
    seconds = time.monotonic() - begin
    print(f"\n{'FAILED' if failed else 'ok'}: {passed} of {passed + failed} checks passed, {seconds:.1f} s")
    return failed == 0


def end_on(number: int, _frame: object) -> None:
    """Leave through the cleaning up."""
    sys.exit(128 + number)


def main() -> int:
    """Exit code 0: all as it should be. 1: something was not. 2: there was no server to play on."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in step with what is written to stderr
    bindir = os.environ.get("NAMED_LOCKS_PG_BIN")
    if not bindir:
        print("NAMED_LOCKS_PG_BIN has to name the folder with initdb and postgres", file=sys.stderr)
        return 2
    names = sys.argv[1:] or list(SITUATIONS)
    if not set(names) <= set(SITUATIONS):
        print(f"{' '.join(names)}: there are {', '.join(SITUATIONS)}", file=sys.stderr)
        return 2
    for variable in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[variable]  # meant for another server
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_on)
    try:
        with throwaway_server(Path(bindir), os.environ.get("NAMED_LOCKS_RUNAS") or None) as server:
            if not play_all(server, [SITUATIONS[name] for name in names]):
                print(f"\nThe end of the server's log:\n{server.log_tail()}", file=sys.stderr)
                return 1
            if sys.stdin.isatty() and sys.stdout.isatty():
                server.keep = True
                print(f"\nThe server is up. Join in:\n  {server.psql_line}\nStop it:\n  {server.stop_line}")
            return 0
    except (ServerError, OSError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
