"""lock_holders with many holds."""

from __future__ import annotations

import statistics
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from common import Bench, Pairs, execute, seconds_of, wait_until
from table import RATIO, Row, Target, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

TARGET = Target("<=", 100, "ms")
SESSIONS = 10
HOLDS = 1_000  # of each
LOCK_MANY = "SELECT count(named_lock('bench:' || %s || ':' || i)) FROM generate_series(1, %s) AS i"


def title(bench: Bench) -> str:
    """What is measured, and how."""
    return (
        f"lock_holders: {SESSIONS * HOLDS:,} holds of {SESSIONS} sessions, {bench.effort.looks} looks "
        "(native: pg_locks, which knows no names)"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """The count alone, and all rows on their way to the client."""
    with ExitStack() as stack:
        for session in range(SESSIONS):
            conn = stack.enter_context(closing(bench.server.connect(f"bench holder {session}")))
            execute(conn, LOCK_MANY, str(session), HOLDS)
        looker = stack.enter_context(closing(bench.server.connect("bench looker")))
        for what in ("count(*)", "*"):
            yield look_row(bench, looker, what)
    with closing(bench.server.connect("bench looker")) as conn:
        wait_until("the holds are gone with their sessions", lambda: not execute(conn, "SELECT FROM lock_holders"))


def look_row(bench: Bench, conn: psycopg.Connection, what: str) -> Row:
    """Read both views in turn."""
    pairs = Pairs([], [])
    for _ in range(bench.effort.looks):
        pairs.native.append(look(conn, what, "pg_locks WHERE locktype = 'advisory'"))
        pairs.named.append(look(conn, what, "lock_holders"))
    row = Row(
        f"SELECT {what}", "ms", spread(pairs.native, "ms"), spread(pairs.named, "ms"), spread(pairs.ratios, RATIO)
    )
    return row._replace(target=str(TARGET), met=TARGET.met_by(statistics.median(pairs.named)))


def look(conn: psycopg.Connection, what: str, source: str, many: int = SESSIONS * HOLDS) -> float:
    """Milliseconds until the client has the result; what Python would make of it is left out."""
    results = []
    statement = f"SELECT {what} FROM {source}".encode()
    took = 1e3 * seconds_of(lambda: results.append(conn.pgconn.exec_(statement)))
    [result] = results
    if result.error_message:
        raise RuntimeError(result.error_message.decode())
    rows = int(result.get_value(0, 0) or 0) if what == "count(*)" else result.ntuples
    if rows != many:
        raise RuntimeError(f"{source}: {rows} rows, not {many}")
    return took
