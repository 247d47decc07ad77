"""Over the wire: a free lock, by pgbench with prepared statements."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common import NATIVE, Bench, Figures, Pairs, Side, execute, in_turn, seconds_of
from table import Row, Target, compared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server import Server

TARGET = Target(">=", 0.97)
NAME = "'bench:' || :client_id"  # each client has a lock of its own
NAME_OF_FIRST = "'bench:first'"
WARM_UP = 1_000  # transactions, which also tell how many fill the time
LIMIT_SECONDS = 120.0  # for one run


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Over the wire: a free lock of one's own, pgbench -M prepared, {effort.wire_rounds} rounds of native, named, "
        f"named, native, {effort.wire_seconds:g} s each"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Both forms with one client and with four, then what the first call of a session costs."""
    for form, script in (("lock; unlock", session_script), ("begin; transaction lock; end", transaction_script)):
        for clients in (1, 4):
            pairs = throughput(bench, script, clients)
            yield compared(f"{form}: {clients} client{'s' * (clients > 1)}", "tx/s", pairs, TARGET)
    [first] = in_turn(bench.effort.first_calls, lambda side: (first_call(bench.server, side),))
    yield compared("first call of a session, the library's loading included", "ms", first)


def session_script(side: Side) -> str:
    """A session lock, and back."""
    return f"select {side.lock.format(NAME)};\nselect {side.unlock.format(NAME)};\n"


def transaction_script(side: Side) -> str:
    """A transaction lock in a transaction block."""
    return f"begin;\nselect {side.xact_lock.format(NAME)};\nend;\n"


def throughput(bench: Bench, script: Callable[[Side], str], clients: int) -> Pairs:
    """Transactions per second of both sides, which run the same number of them."""
    with tempfile.TemporaryDirectory(prefix="named_locks-") as folder:
        path = Path(folder) / "script.sql"

        def run(side: Side, transactions: int) -> Figures:
            path.write_text(script(side))
            return (pgbench(bench.server, path, clients, transactions),)

        (rate,) = run(NATIVE, WARM_UP)
        transactions = max(WARM_UP, round(rate * bench.effort.wire_seconds / clients))
        [pairs] = in_turn(bench.effort.wire_rounds, partial(run, transactions=transactions))
        return pairs


def pgbench(server: Server, script: Path, clients: int, transactions: int) -> float:
    """Run a script `transactions` times by each client; transactions per second, without the time to connect."""
    threads = min(clients, os.cpu_count() or 1)
    command = [str(server.bindir / "pgbench"), "--no-vacuum", "--protocol=prepared", f"--file={script}"]
    options = [f"--client={clients}", f"--jobs={threads}", f"--transactions={transactions}", server.conninfo]
    done = subprocess.run(command + options, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    rate = re.search(r"^tps = ([0-9.]+) \(without initial connection time\)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or rate is None:
        raise RuntimeError(f"pgbench: {done.stderr.strip() or done.stdout.strip()}")
    return float(rate.group(1))


def first_call(server: Server, side: Side) -> float:
    """Milliseconds that a new session's first lock takes."""
    with closing(server.connect("bench first call")) as conn:
        execute(conn, "SELECT 1")
        took = seconds_of(lambda: execute(conn, f"SELECT {side.lock.format(NAME_OF_FIRST)}"))
        execute(conn, f"SELECT {side.unlock.format(NAME_OF_FIRST)}")  # else the next one waits for this session's end
        return 1e3 * took
