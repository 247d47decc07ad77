"""What the parts share: the server, how much to measure, the two sides, and runs in turn."""

from __future__ import annotations

import statistics
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from server import Server, throwaway_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import psycopg

PATIENCE = 10.0  # seconds for anything that should happen at once

# Nothing that works in the background while we measure.
SETTINGS = """
max_locks_per_transaction = {locks}
autovacuum = off
"""
ROOM = 256  # for 10,000 locks at once and more


class Effort(NamedTuple):
    """How much to measure."""

    wire_rounds: int  # each is native, named, named, native
    wire_seconds: float  # of one pgbench run, roughly
    first_calls: int  # rounds of new sessions
    loop_rounds: int
    loop_pairs: int
    contenders: tuple[int, ...]  # how many sessions want the one lock
    contended_rounds: int
    contended_seconds: float  # of one run
    timeouts: int  # of each duration
    looks: int  # reads of the view
    wake_ups: int  # hand-overs of each side
    leak_pairs: int
    leak_timeouts: int
    beside_rounds: int  # in each, all systems in turn
    beside_seconds: float  # of one system's slice
    beside_warm_up: float
    clients: tuple[int, ...]  # each with a name of its own
    hot_clients: tuple[int, ...]
    held: tuple[int, ...]  # locks held by one session
    holders: tuple[int, ...]  # rows of lock_holders
    live: tuple[int, ...]  # leases
    names: tuple[int, ...]  # ever used; hundreds of thousands
    counted_pairs: int  # instruction by instruction


FULL = Effort(
    wire_rounds=7,
    wire_seconds=0.7,
    first_calls=10,
    loop_rounds=5,
    loop_pairs=300_000,
    contenders=(2, 4, 8),
    contended_rounds=4,
    contended_seconds=0.6,
    timeouts=200,
    looks=20,
    wake_ups=400,
    leak_pairs=1_000_000,
    leak_timeouts=10_000,
    beside_rounds=7,
    beside_seconds=0.5,
    beside_warm_up=0.1,
    clients=(1, 4, 16),
    hot_clients=(2, 4, 8, 16, 32, 64),
    held=(1, 10, 100, 1_000, 10_000, 100_000),
    holders=(10, 100, 1_000, 10_000, 50_000),
    live=(10, 100, 1_000, 10_000, 100_000, 1_000_000),
    names=(300_000, 1_000_000, 3_000_000, 10_000_000),
    counted_pairs=10_000,
)
SHORT = Effort(
    wire_rounds=1,
    wire_seconds=0.15,
    first_calls=3,
    loop_rounds=2,
    loop_pairs=30_000,
    contenders=(2, 8),
    contended_rounds=1,
    contended_seconds=0.3,
    timeouts=20,
    looks=5,
    wake_ups=40,
    leak_pairs=100_000,
    leak_timeouts=1_000,
    beside_rounds=1,
    beside_seconds=0.15,
    beside_warm_up=0.05,
    clients=(1, 16),
    hot_clients=(2, 64),
    held=(1, 100, 10_000),
    holders=(10, 1_000, 10_000),
    live=(10, 1_000, 10_000),
    names=(200_000, 400_000),
    counted_pairs=1_000,
)


class Bench(NamedTuple):
    """What a part needs."""

    server: BenchServer
    effort: Effort


class Side(NamedTuple):
    """One of the two contestants, in SQL. `{}` stands for the expression that makes the name."""

    lock: str
    unlock: str
    xact_lock: str


NATIVE = Side(
    "pg_advisory_lock(hashtextextended({}, 0))",
    "pg_advisory_unlock(hashtextextended({}, 0))",
    "pg_advisory_xact_lock(hashtextextended({}, 0))",
)
NAMED = Side("named_lock({})", "named_unlock({})", "named_xact_lock({})")

# What a run gives, one or several numbers of one kind each.
Figures = tuple[float, ...]


class Pairs(NamedTuple):
    """One number of each side per round."""

    native: list[float]
    named: list[float]

    @property
    def ratios(self) -> list[float]:
        """Named by native, round by round."""
        return [named / native for native, named in zip(self.native, self.named)]


def in_turn(rounds: int, run: Callable[[Side], Figures]) -> list[Pairs]:
    """Run both sides in turn, A B B A, `rounds` times: whatever drifts meanwhile falls on both.

    For each of the run's numbers, the mean of the two runs that each side has in a round.
    """
    done = [[run(side) for side in (NATIVE, NAMED, NAMED, NATIVE)] for _ in range(rounds)]
    return [
        Pairs(
            [statistics.fmean((first[at], last[at])) for first, _, _, last in done],
            [statistics.fmean((second[at], third[at])) for _, second, third, _ in done],
        )
        for at in range(len(done[0][0]))
    ]


def execute(conn: psycopg.Connection, statement: str, *arguments: object) -> list[tuple[object, ...]]:
    """Run a statement that was put together here, and return its rows."""
    cursor = conn.execute(statement.encode(), arguments or None)
    return cursor.fetchall() if cursor.description else []


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.01)


def locks_held(conn: psycopg.Connection) -> int:
    """How many advisory locks, named ones included, the lock manager has for this session."""
    [(rows,)] = conn.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
    return int(rows)


class BenchServer(Server):
    """A server with room for many locks; how many for each of its hundred sessions or so, `locks` says."""

    def __init__(self, bindir: Path, folder: Path, runas: str | None = None, locks: int = ROOM) -> None:
        super().__init__(bindir, folder, runas)
        self._locks = locks

    def create(self) -> None:
        """Make the data directory."""
        super().create()
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(SETTINGS.format(locks=self._locks))

    def prepare(self) -> None:
        """The ordinary role may look at its own memory too."""
        super().prepare()
        with self.superuser() as conn:
            conn.execute("GRANT SELECT ON pg_backend_memory_contexts TO demo")
            conn.execute("GRANT EXECUTE ON FUNCTION pg_get_backend_memory_contexts() TO demo")

    def vacuum(self, *tables: str) -> None:
        """Clear these tables of dead rows, the extension's among them."""
        with self.superuser() as conn:
            conn.execute(f"VACUUM {', '.join(tables)}".encode())

    def shut_down(self) -> None:
        """Stop it and keep its data."""
        done = subprocess.run(
            [str(self.bindir / "pg_ctl"), "-D", str(self.data), "-m", "fast", "-w", "stop"],
            check=False,
            capture_output=True,
            text=True,
            **self.as_user(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"pg_ctl: {done.stderr.strip()}")

    def lift_limit(self) -> None:
        """New sessions may hold as many locks as there is room for."""
        with self.superuser() as conn:
            conn.execute("ALTER ROLE demo SET named_locks.max_locks_per_session = 1000000")


def bench_server(bindir: Path, runas: str | None, locks: int = ROOM) -> AbstractContextManager[BenchServer]:
    """Run such a server for a block."""
    return throwaway_server(bindir, runas, partial(BenchServer, locks=locks))
