"""In the server: a free lock, many times in one statement."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from common import NAMED, NATIVE, Bench, Figures, Pairs, Side, execute, in_turn, locks_held, seconds_of
from table import Row, Target, compared

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

TARGET = Target("<=", 1.25)

LOOP = """
DO $$
DECLARE
    lock_name text := 'bench:loop';
BEGIN
    FOR i IN 1..{pairs} LOOP
        PERFORM {lock};
        PERFORM {unlock};
    END LOOP;
END
$$"""

# What stands in the loop for the name. With a constant the planner computes native's key once, before the loop.
LOOP_NAMES = {
    "a constant name": "'bench:loop'",
    "the name in a variable": "lock_name",
    "each time another name": "'bench:' || i",
}

# The calls of a row are made from left to right; the subquery is not flattened, as they are volatile.
SET_BASED = """
SELECT count(*)
  FROM (SELECT {lock}, {unlock}
          FROM (SELECT 'bench:' || i % 1000 AS lock_name FROM generate_series(1, {pairs}) AS i) AS names) AS calls"""


def title(bench: Bench) -> str:
    """What is measured, and how."""
    pairs, rounds = bench.effort.loop_pairs, bench.effort.loop_rounds
    return f"In the server: a free lock, {pairs:,} pairs in one statement, {rounds} rounds, jit off"


def measure(bench: Bench) -> Iterator[Row]:
    """The loops, and one statement over a set."""
    with closing(bench.server.connect("bench inside")) as conn:
        execute(conn, "SET jit = off")
        for what, name in LOOP_NAMES.items():
            yield compared(f"DO loop: {what}", "ns/pair", timed(bench, conn, LOOP, name), TARGET)
        times = timed(bench, conn, SET_BASED, "lock_name")
        yield compared("SELECT over a set: 1,000 names", "ns/pair", times)


def timed(bench: Bench, conn: psycopg.Connection, statement: str, name: str) -> Pairs:
    """Nanoseconds per pair of both sides; `name` is the expression that makes the name."""
    pairs = bench.effort.loop_pairs

    def run(side: Side) -> Figures:
        text = statement.format(lock=side.lock.format(name), unlock=side.unlock.format(name), pairs=pairs)
        took = seconds_of(lambda: execute(conn, text))
        if locks_held(conn):
            raise RuntimeError(f"locks are left after\n{text}")
        return (1e9 * took / pairs,)

    for side in (NATIVE, NAMED):
        run(side)  # to load the library and fill the caches
    [times] = in_turn(bench.effort.loop_rounds, run)
    return times
