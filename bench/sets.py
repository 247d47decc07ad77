"""Sets and trees of names: beside the same number of single locks."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import wire
from common import NAMED, NATIVE, Bench, Figures, Pairs, Side, execute, in_turn, locks_held, seconds_of
from inside import LOOP
from table import Row, Target, compared, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = 100
# pgbench takes what follows a colon for a variable: names without one.
ARRAY = "array[" + ", ".join(f"'bench {number}'" for number in range(NAMES)) + "]"
NATIVE_SET = f"select count({NATIVE.lock.format('name')}) from unnest({ARRAY}) as name"
NATIVE_XACT_SET = f"select count({NATIVE.xact_lock.format('name')}) from unnest({ARRAY}) as name"

CONTENDED = 1_000
ANY_TARGET = Target("<=", 2, "ms")

SINGLE = ("named_lock('a')", "named_unlock('a')")
TREE = ("named_lock_tree('a/b/c/d')", "named_unlock_tree('a/b/c/d')")
TREE_TARGET = Target("<=", 4.5)


CONTESTS = (
    wire.Contest(
        f"{NAMES} names: named_lock_all (native: {NAMES} statements, named_lock)",
        {
            NATIVE: "".join(f"select named_lock('bench {number}');\n" for number in range(NAMES))
            + "select named_unlock_all();\n",
            NAMED: f"select named_lock_all({ARRAY});\nselect named_unlock_all();\n",
        },
        Target("<=", 0.5),
    ),
    wire.Contest(
        f"{NAMES} names: named_lock_all (native: one statement, pg_advisory_lock)",
        {
            NATIVE: f"{NATIVE_SET};\nselect pg_advisory_unlock_all();\n",
            NAMED: f"select named_lock_all({ARRAY});\nselect pg_advisory_unlock_all();\n",
        },
        Target("<=", 1.2),
    ),
    wire.Contest(
        f"{NAMES} names: named_xact_lock_all (native: one statement, pg_advisory_xact_lock)",
        {NATIVE: f"{NATIVE_XACT_SET};\n", NAMED: f"select named_xact_lock_all({ARRAY});\n"},
        Target("<=", 1.2),
    ),
)


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Sets and trees: pgbench -M prepared, 1 client, both sides mixed, {effort.wire_rounds} rounds of "
        f"{effort.wire_seconds * 4:g} s; and in one statement"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Sets against single locks, a choice among contended names, and a tree against a single lock."""
    for contest in CONTESTS:
        rates = wire.mixed(bench, contest.scripts.__getitem__)
        times = Pairs([1e3 / rate for rate in rates.native], [1e3 / rate for rate in rates.named])
        yield compared(contest.what, "ms", times, contest.target)
    yield choice(bench)
    yield tree(bench)


def choice(bench: Bench) -> Row:
    """named_lock_any, where the last of many names alone is free."""
    names = [f"bench any {number}" for number in range(1, CONTENDED + 1)]
    # Made by the server: how long a client takes to send so many is another matter.
    array = f"ARRAY(SELECT 'bench any ' || i FROM generate_series(1, {CONTENDED}) AS i)"
    with ExitStack() as stack:
        holder, chooser = (stack.enter_context(closing(bench.server.connect(f"bench any {who}"))) for who in "ab")
        execute(holder, "SELECT named_lock_all(%s)", names[:-1])
        took = []
        for _ in range(max(50, bench.effort.looks)):
            begin = time.perf_counter()
            chosen = execute(chooser, f"SELECT named_lock_any({array})")
            took.append(1e3 * (time.perf_counter() - begin))
            if chosen != [(names[-1],)]:
                raise RuntimeError(f"chosen was {chosen}")
            execute(chooser, "SELECT named_unlock_all()")
    what = f"named_lock_any: the one free of {CONTENDED:,} names"
    row = Row(what, "ms", named=spread(took, "ms"))
    return row._replace(target=str(ANY_TARGET), met=ANY_TARGET.met_by(statistics.median(took)))


def tree(bench: Bench) -> Row:
    """A path of four parts (named) beside one plain lock (under native)."""
    pairs = bench.effort.loop_pairs // 10
    with closing(bench.server.connect("bench tree")) as conn:
        execute(conn, "SET jit = off")

        def run(side: Side) -> Figures:
            lock, unlock = SINGLE if side == NATIVE else TREE
            took = seconds_of(lambda: execute(conn, LOOP.format(lock=lock, unlock=unlock, pairs=pairs)))
            if locks_held(conn):
                raise RuntimeError("locks are left")
            return (1e9 * took / pairs,)

        for side in (NATIVE, NAMED):
            run(side)
        [times] = in_turn(bench.effort.loop_rounds, run)
    what = "named_lock_tree, 4 parts, and back, in a DO loop (native: named_lock)"
    return compared(what, "ns/pair", times, TREE_TARGET)
