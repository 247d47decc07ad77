"""Measure named locks beside native advisory locks, and side by side with MariaDB, Redis and etcd.

    run.py [--short] [--results=FOLDER] [PART ...]    all, or those named: wire, inside, handover, lateness,
                                 holders, leaks, leases, sets; free, hot, durable, scale, instructions

--short               less of everything, to see that it works
--results=FOLDER      where figures, table and plots are written; without it, all parts in full write bench/results/,
                      and else nothing is written

NAMED_LOCKS_PG_BIN    the folder with initdb, postgres and pgbench, of a server in which the extension is installed
NAMED_LOCKS_RUNAS     for root only: the OS user to run the server as
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))  # for server and stage

import durable
import free
import generator
import handover
import holders
import hot
import inside
import instructions
import lateness
import leaks
import leases
import plots
import results
import scale
import sets
import wire
from common import FULL, SHORT, Bench, BenchServer, Effort, bench_server
from server import ServerError
from table import Entry, Row, Section, print_table

if TYPE_CHECKING:
    from types import ModuleType

    from server import Server

BESIDE = (free, hot, durable, scale)
PARTS = {
    part.__name__: part
    for part in (wire, inside, handover, lateness, holders, leaks, leases, sets, *BESIDE, instructions)
}


def measure(part: ModuleType, bench: Bench) -> Section:
    """Measure one part; whatever breaks it off is told, and what was measured before stays."""
    title: str = part.title(bench)
    print(f"measuring: {title.partition(':')[0]}", end="", file=sys.stderr, flush=True)
    rows: list[Row | Entry] = []
    failure = None
    begin = time.monotonic()
    try:
        rows.extend(part.measure(bench))
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    print(f", {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return Section(title, rows, failure, part.__name__)


def head(server: Server) -> str:
    """What was measured on what."""
    with server.connect("bench") as conn:
        [(version, extension, assertions)] = conn.execute(
            """SELECT current_setting('server_version'), extversion, current_setting('debug_assertions')
                 FROM pg_extension WHERE extname = 'named_locks'"""
        )
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} CPUs ({platform.machine()}), load average {load:.1f} before the start"
    text = f"PostgreSQL {version}, named_locks {extension}, {machine}"
    if assertions == "on":
        text += "\nThe server is built with assertions: its times say little."
    return text


def measure_all(server: BenchServer, effort: Effort, parts: list[ModuleType], folder: Path | None) -> bool:
    """Measure, print and write; True if nothing is missing."""
    if set(parts) & set(BESIDE):
        generator.program()  # before anything is measured
    if folder:
        plots.check()
    begin = time.monotonic()
    print(head(server))
    sections = [measure(part, Bench(server, effort)) for part in parts]
    print("Figures are medians, with the least and the most in brackets; ratios are taken round by round.\n")
    print_table(sections)
    if folder:
        results.write(folder, server, sections)
        print(f"results: {folder}")
    judged = [row.met for section in sections for row in section.rows if row.met is not None]
    missing = sum(section.failure is not None for section in sections)
    print(f"\n{sum(judged)} of {len(judged)} targets met, {time.monotonic() - begin:.0f} s", end="")
    print(f", {missing} of {len(parts)} parts not measured" if missing else "")
    return missing == 0


def end_on(number: int, _frame: object) -> None:
    """Leave through the cleaning up."""
    sys.exit(128 + number)


def main() -> int:
    """Exit code 0: all was measured, whatever came out. 1: something was not. 2: there was no server to measure."""
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    names = [argument for argument in sys.argv[1:] if argument not in options]
    effort = SHORT if "--short" in options else FULL
    folder = None if names or effort is SHORT else results.FOLDER
    for option in options:
        if option.startswith("--results="):
            folder = Path(option.partition("=")[2])
        elif option != "--short":
            names.append(option)  # an unknown one
    bindir = os.environ.get("NAMED_LOCKS_PG_BIN")
    if not bindir:
        print("NAMED_LOCKS_PG_BIN has to name the folder with initdb, postgres and pgbench", file=sys.stderr)
        return 2
    if not set(names) <= set(PARTS):
        print(f"{' '.join(names)}: there are {', '.join(PARTS)}, --short and --results=FOLDER", file=sys.stderr)
        return 2
    for variable in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[variable]  # meant for another server
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_on)
    try:
        with bench_server(Path(bindir), os.environ.get("NAMED_LOCKS_RUNAS") or None) as server:
            return 0 if measure_all(server, effort, [PARTS[name] for name in names or PARTS], folder) else 1
    except (ServerError, OSError, KeyError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
