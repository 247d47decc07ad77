"""Leaks: what a session has more after very many locks and timeouts than before."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lateness
from common import NAMED, NATIVE, Bench, Side, execute, locks_held
from table import Row, Target, stated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    Work = Callable[[psycopg.Connection, Side, int], None]

# In the long form, that is a quarter of a byte for each pair and 26 bytes for each timeout. The kernel counts no finer.
MEMORY_TARGET = Target("<=", 256, "KiB")
CONTEXTS_TARGET = Target("<=", 64, "KiB")
LOCKS_TARGET = Target("<=", 0, "rows")

# A new name for each pair.
PAIRS = """
DO $$
BEGIN
    FOR i IN 1..{pairs} LOOP
        PERFORM {lock};
        PERFORM {unlock};
    END LOOP;
END
$$"""


class Usage(NamedTuple):
    """What a session has, or has more than before; sizes in KiB."""

    own: int
    shared: int
    peak: int
    contexts: int
    locks: int


# What is shown of it.
ROWS = (
    ("own", "the process's own memory (VmRSS without RssShmem)", "KiB", MEMORY_TARGET),
    ("peak", "its peak, shared memory included (VmHWM)", "KiB", None),
    ("shared", "shared memory touched (RssShmem)", "KiB", None),
    ("contexts", "memory contexts", "KiB", CONTEXTS_TARGET),
    ("locks", "rows left in pg_locks", "rows", LOCKS_TARGET),
)


def title(_bench: Bench) -> str:
    """What is measured, and how."""
    return "Leaks: growth of one session, after a warm-up of a hundredth part"


def measure(bench: Bench) -> Iterator[Row]:
    """After the pairs, and after the timeouts."""
    pairs, timeouts = bench.effort.leak_pairs, bench.effort.leak_timeouts
    with lateness.held(bench.server):
        yield from growth_rows(bench, f"{pairs:,} pairs", lock_and_unlock, pairs)
        yield from growth_rows(bench, f"{timeouts:,} timeouts", time_out, timeouts)


def growth_rows(bench: Bench, what: str, work: Work, times: int) -> Iterator[Row]:
    """Do it in a new session of each side."""
    native, named = (growth(bench, side, work, times) for side in (NATIVE, NAMED))
    for field, name, unit, target in ROWS:
        yield stated(f"{what}: {name}", unit, getattr(native, field), getattr(named, field), target)


def growth(bench: Bench, side: Side, work: Work, times: int) -> Usage:
    """What the session has more afterwards; locks as they are."""
    with closing(bench.server.connect("bench leaks")) as conn:
        conn.prepare_threshold = None  # no statements kept by the client's doing
        lateness.prepare(conn)
        for _ in range(2):
            work(conn, side, times // 100)
            usage(conn)
        before = usage(conn)
        work(conn, side, times)
        after = usage(conn)
        return Usage(*(now - then for now, then in zip(after, before)))._replace(locks=after.locks)


def lock_and_unlock(conn: psycopg.Connection, side: Side, times: int) -> None:
    """All pairs in one statement."""
    name = "'bench:' || i"
    execute(conn, PAIRS.format(pairs=times, lock=side.lock.format(name), unlock=side.unlock.format(name)))


def time_out(conn: psycopg.Connection, side: Side, times: int) -> None:
    """Timeouts of a millisecond."""
    lateness.time_out(conn, side, times, 1)


def usage(conn: psycopg.Connection) -> Usage:
    """What this session has now."""
    [(contexts,)] = conn.execute("SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts")
    status = dict(line.split(":", 1) for line in Path(f"/proc/{conn.info.backend_pid}/status").read_text().splitlines())
    resident, shared, peak = (int(status[field].split()[0]) for field in ("VmRSS", "RssShmem", "VmHWM"))
    return Usage(resident - shared, shared, peak, contexts // 1024, locks_held(conn))
