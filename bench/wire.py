"""Over the wire: a free lock, by pgbench with prepared statements."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import NAMED, NATIVE, Bench, Figures, Pairs, Side, execute, in_turn, seconds_of
from table import Row, Target, compared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from server import Server

TARGET = Target(">=", 0.97)
NAME = "'bench:' || :client_id"  # each client has a lock of its own
NAME_OF_FIRST = "'bench:first'"
WARM_UP = 1_000  # transactions of a client, which also tell how many fill the time
MOST_WARM_UP = 4_000  # of all clients together
LIMIT_SECONDS = 120.0  # for one run


class Contest(NamedTuple):
    """What is compared with what: a pgbench script of each side, and what the ratio has to be."""

    what: str
    scripts: dict[Side, str]
    target: Target


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


def throughput(
    bench: Bench,
    script: Callable[[Side], str],
    clients: int,
    options: Sequence[str] = (),
    before: Callable[[], None] = lambda: None,
) -> Pairs:
    """Transactions per second of both sides, which run the same number of them; `before` each run, something to do."""

    def run(side: Side, transactions: int) -> Figures:
        before()
        return (pgbench(bench.server, [script(side)], clients, transactions, options),)

    least = min(WARM_UP, MOST_WARM_UP // clients)
    (rate,) = run(NATIVE, least)
    transactions = max(least, round(rate * bench.effort.wire_seconds / clients))
    [pairs] = in_turn(bench.effort.wire_rounds, partial(run, transactions=transactions))
    return pairs


def mixed(
    bench: Bench,
    script: Callable[[Side], str],
    options: Sequence[str] = (),
    before: Callable[[], None] = lambda: None,
) -> Pairs:
    """The same with one client, which runs the one side's script or the other's, by chance, transaction by transaction.

    What drifts from one run to the next, a disk above all, falls on both. The rate is one over the mean time.
    """
    sides = (NATIVE, NAMED)

    def run(transactions: int) -> list[float]:
        before()
        with tempfile.TemporaryDirectory(prefix="named_locks-") as folder:
            log = ("--log", f"--log-prefix={folder}/log")
            pgbench(bench.server, [script(side) for side in sides], 1, transactions, (*options, *log))
            lines = [line.split() for path in Path(folder).glob("log*") for line in path.read_text().splitlines()]
        times: tuple[list[int], ...] = ([], [])
        for _, _, microseconds, number, *_ in lines:
            times[int(number)].append(int(microseconds))
        return [1e6 / statistics.fmean(taken) for taken in times]

    transactions = max(WARM_UP, round(statistics.harmonic_mean(run(WARM_UP)) * bench.effort.wire_seconds * 4))
    rates = [run(transactions) for _ in range(bench.effort.wire_rounds)]
    return Pairs([native for native, _ in rates], [named for _, named in rates])


def pgbench(
    server: Server, scripts: Sequence[str], clients: int, transactions: int, options: Sequence[str] = ()
) -> float:
    """Run a script `transactions` times by each client; transactions per second, without the time to connect.

    Of several scripts, each client runs any each time.
    """
    threads = min(clients, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="named_locks-") as folder:
        paths = [Path(folder) / f"script{number}.sql" for number in range(len(scripts))]
        for path, script in zip(paths, scripts):
            path.write_text(script)
        files = [f"--file={path}" for path in paths]
        command = [str(server.bindir / "pgbench"), "--no-vacuum", "--protocol=prepared", *files, *options]
        size = [f"--client={clients}", f"--jobs={threads}", f"--transactions={transactions}", server.conninfo]
        done = subprocess.run(command + size, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
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
