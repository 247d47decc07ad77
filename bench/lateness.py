"""Timeouts: how much later than asked for the answer comes."""

from __future__ import annotations

import statistics
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from common import NAMED, NATIVE, Bench, Side, execute
from table import RATIO, Row, Target, number, percentile, spread, stated

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from server import Server

TARGET = Target("<=", 10, "ms")
DURATIONS = (20, 50)  # milliseconds
SHARES = 4  # each side's timeouts are spread over so many turns

# How late, in milliseconds, each of so many timeouts on a held lock is. Native has lock_timeout and an error instead of
# an answer.
NAMED_TIMEOUTS = """
CREATE FUNCTION pg_temp.named_timeouts(tries integer, wait_ms integer) RETURNS SETOF float8 LANGUAGE plpgsql AS $$
DECLARE
    wait interval := make_interval(secs => wait_ms / 1000.0);
    begun timestamptz;
BEGIN
    FOR i IN 1..tries LOOP
        begun := clock_timestamp();
        IF named_lock('bench:held', wait) THEN
            RAISE 'a lock that another session holds was granted';
        END IF;
        RETURN NEXT extract(epoch FROM clock_timestamp() - begun) * 1000 - wait_ms;
    END LOOP;
END
$$"""
NATIVE_TIMEOUTS = """
CREATE FUNCTION pg_temp.native_timeouts(tries integer, wait_ms integer) RETURNS SETOF float8 LANGUAGE plpgsql AS $$
DECLARE
    begun timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', wait_ms::text, true);
    FOR i IN 1..tries LOOP
        begun := clock_timestamp();
        BEGIN
            PERFORM pg_advisory_lock(hashtextextended('bench:held', 0));
            RAISE 'a lock that another session holds was granted';
        EXCEPTION
            WHEN lock_not_available THEN
                RETURN NEXT extract(epoch FROM clock_timestamp() - begun) * 1000 - wait_ms;
        END;
    END LOOP;
END
$$"""


def title(bench: Bench) -> str:
    """What is measured, and how."""
    return (
        f"Timeouts: how late the answer is, {bench.effort.timeouts} of each duration on a held lock, in one session "
        f"(native: lock_timeout and a caught error)"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """The spread of the lateness, and its 99th percentile, for each duration."""
    with held(bench.server), closing(bench.server.connect("bench timeouts")) as conn:
        prepare(conn)
        for wait_ms in DURATIONS:
            native, named = late(bench, conn, wait_ms)
            ratio = number(statistics.median(named) / statistics.median(native), RATIO)
            yield Row(f"{wait_ms} ms: median", "ms", spread(native, "ms"), spread(named, "ms"), ratio)
            p99 = percentile(native, 99), percentile(named, 99)
            yield stated(f"{wait_ms} ms: p99", "ms", *p99, TARGET)


@contextmanager
def held(server: Server) -> Iterator[None]:
    """Another session holds the lock during the block."""
    with closing(server.connect("bench holder")) as conn:
        for side in (NATIVE, NAMED):
            execute(conn, "SELECT " + side.lock.format("'bench:held'"))
        yield


def prepare(conn: psycopg.Connection) -> None:
    """Make the functions, and call each once."""
    for statement in (NATIVE_TIMEOUTS, NAMED_TIMEOUTS):
        execute(conn, statement)
    for side in (NATIVE, NAMED):
        time_out(conn, side, 1, 1)


def time_out(conn: psycopg.Connection, side: Side, tries: int, wait_ms: int) -> list[float]:
    """Run into the timeout so many times, in one statement; how late each was."""
    function = "named_timeouts" if side is NAMED else "native_timeouts"
    rows = execute(conn, f"SELECT late FROM pg_temp.{function}(%s, %s) AS late", tries, wait_ms)
    return [float(str(late)) for (late,) in rows]


def late(bench: Bench, conn: psycopg.Connection, wait_ms: int) -> tuple[list[float], list[float]]:
    """Both sides in turn, A B B A."""
    native: list[float] = []
    named: list[float] = []
    turns = [(NATIVE, native), (NAMED, named), (NAMED, named), (NATIVE, native)] * (SHARES // 2)
    for side, seen in turns:
        seen += time_out(conn, side, bench.effort.timeouts // SHARES, wait_ms)
    return native, named
