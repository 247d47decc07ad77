"""How the time of one call, and the memory, grow with what there is."""

from __future__ import annotations

import statistics
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import generator
import holders
import inside
import leaks
from common import NAMED, NATIVE, Bench, Side, bench_server, execute, seconds_of, wait_until
from leases import BY_HAND
from table import Entry, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psycopg

ROOM = 2_048  # for 100,000 locks of either side at once
ROUNDS = 3
PAIRS = 20_000  # of one loop
LABELS = {NATIVE: "native", NAMED: "named"}
# A curve that is flat or logarithmic: its last point by its least.
GROWTH = Target("<=", 2.0)
MEMORY = Target("<=", 1_024, "KiB")

HOLD = "SELECT count(*) FROM (SELECT {lock} FROM generate_series(%s::int, %s::int) AS i OFFSET 0) AS calls"
CHUNK = 100_000  # names of one statement
USE = """
SELECT count(*)
  FROM (SELECT named_lock('bench:' || i), named_unlock('bench:' || i)
          FROM generate_series(%s::int, %s::int) AS i OFFSET 0) AS calls"""
GRANTS = 2_000  # of one transaction
GRANT = """
SELECT count(*)
  FROM generate_series(%s::int, %s::int) AS i, lease_acquire('live:' || i, '1 day', owner => 'bench') WHERE acquired"""
INSERT = """
INSERT INTO hand_lease
SELECT 'live:' || i, nextval('hand_token'), 'bench', clock_timestamp() + '1 day'
  FROM generate_series(%s::int, %s::int) AS i"""


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Scale: up to {effort.held[-1]:,} locks held by one session, {effort.holders[-1]:,} holders in the view, "
        f"{effort.live[-1]:,} live leases, {effort.names[-1]:,} names ever used"
    )


def measure(bench: Bench) -> Iterator[Entry]:
    """The four curves, on a server of its own, with room for so many locks."""
    with bench_server(bench.server.bindir, bench.server.runas, ROOM) as server:
        server.lift_limit()
        roomy = bench._replace(server=server)
        yield from held(roomy)
        yield from viewed(roomy)
        yield from used(roomy)
        yield from live(roomy)


def grown(curve: Sequence[Entry], target: Target | None = None) -> Iterator[Entry]:
    """A curve, its last point judged by its least."""
    *most, last = curve
    yield from most
    medians = [statistics.median(entry.figures) for entry in curve]
    met = target.met_by(medians[-1] / min(medians)) if target else None
    yield last._replace(target=f"{target} of the least" if target else "", met=met)


def held(bench: Bench) -> Iterator[Entry]:
    """A free lock and back, in the server, in a session that holds many others; both sides in turn."""
    curves: dict[Side, list[Entry]] = {NATIVE: [], NAMED: []}
    with ExitStack() as stack:
        sessions = {side: stack.enter_context(closing(bench.server.connect("bench held"))) for side in LABELS}
        before = 0
        for many in bench.effort.held:
            for side, conn in sessions.items():
                execute(conn, "SET jit = off")
                execute(conn, HOLD.format(lock=side.lock.format("'held:' || i")), before + 1, many)
            before = many
            times: dict[Side, list[float]] = {NATIVE: [], NAMED: []}
            for _ in range(ROUNDS):
                for side, conn in sessions.items():
                    times[side].append(nanoseconds_of_pair(conn, side))
            for side, label in LABELS.items():
                curves[side].append(Entry("lock; unlock beside", many, "locks held", label, "ns", times[side]))
    yield from grown(curves[NATIVE])
    yield from grown(curves[NAMED], GROWTH)
    wait_until_free(bench)


def nanoseconds_of_pair(conn: psycopg.Connection, side: Side) -> float:
    """In a loop, each time with another name."""
    lock, unlock = (call.format("'free:' || i") for call in (side.lock, side.unlock))
    loop = inside.LOOP.format(pairs=PAIRS, lock=lock, unlock=unlock)
    return 1e9 * seconds_of(lambda: execute(conn, loop)) / PAIRS


def viewed(bench: Bench) -> Iterator[Entry]:
    """lock_holders, by how many rows it has, beside pg_locks, which knows no names; all rows to the client."""
    curves: dict[str, list[Entry]] = {"pg_locks": [], "lock_holders": []}
    with ExitStack() as stack:
        sessions = [stack.enter_context(closing(bench.server.connect("bench holder"))) for _ in range(holders.SESSIONS)]
        looker = stack.enter_context(closing(bench.server.connect("bench looker")))
        before = 0
        for many in bench.effort.holders:
            share, done = many // len(sessions), before // len(sessions)
            for number, conn in enumerate(sessions):
                execute(conn, HOLD.format(lock=f"named_lock('held:{number}:' || i)"), done + 1, share)
            before = many
            for view, curve in curves.items():
                source = "pg_locks WHERE locktype = 'advisory'" if view == "pg_locks" else view
                looks = [holders.look(looker, "*", source, many) * 1e3 / many for _ in range(ROUNDS + 1)]
                curve.append(Entry("a row of the view", many, "holders", view, "us", looks[1:]))
    yield from grown(curves["pg_locks"])
    yield from grown(curves["lock_holders"], GROWTH)
    wait_until_free(bench)


def wait_until_free(bench: Bench) -> None:
    """Until the holds are gone with their sessions."""
    with closing(bench.server.connect("bench looker")) as conn:
        wait_until("the holds are gone", lambda: not execute(conn, "SELECT FROM lock_holders LIMIT 1"))


def used(bench: Bench) -> Iterator[Entry]:
    """One session's memory, its own and what it sees of the shared, after very many names; and the time of a name."""
    memory: dict[str, list[Entry]] = {"own": [], "shared": []}
    times: list[Entry] = []
    with closing(bench.server.connect("bench names")) as conn:
        execute(conn, "SET jit = off")  # a compiler is larger than anything measured here
        for chunk in range(2):  # of a size as all the others, until it has what it needs
            execute(conn, USE, -(chunk + 1) * CHUNK, -chunk * CHUNK - 1)
        before, first = 0, leaks.usage(conn)
        for many in bench.effort.names:
            spent = [
                1e9 / CHUNK * seconds_of(partial(execute, conn, USE, begin + 1, begin + CHUNK))
                for begin in range(before, many, CHUNK)
            ]
            now = leaks.usage(conn)
            times.append(Entry("lock; unlock of a new name", many, "names used", "named", "ns", spent))
            for kind, value in (("own", now.own - first.own), ("shared", now.shared - first.shared)):
                memory[kind].append(Entry(f"{kind} memory more", many, "names used", "named", "KiB", [float(value)]))
            before = many
    yield from grown(times, GROWTH)
    for curve in memory.values():
        *most, last = curve
        yield from most
        yield last._replace(target=str(MEMORY), met=MEMORY.met_by(last.figures[0]))


def live(bench: Bench) -> Iterator[Entry]:
    """A lease of one's own beside many others, without waiting for the disk, which would hide it."""
    cases = {"pair": "lease: acquire; release beside", "renew": "lease: renew beside"}
    systems = {"hand": ("SQL by hand", INSERT), "lease": ("lease", GRANT)}
    curves: dict[tuple[str, str], list[Entry]] = {(work, system): [] for work in cases for system in systems}
    address = f"{bench.server.conninfo} options='-c synchronous_commit=off'"
    with closing(bench.server.connect("bench live")) as conn:
        execute(conn, "SET synchronous_commit = off")
        execute(conn, BY_HAND)
        before = 0
        for many in bench.effort.live:
            for _, statement in systems.values():
                for begin in range(before, many, GRANTS):
                    execute(conn, statement, begin + 1, min(begin + GRANTS, many))
            before = many
            bench.server.vacuum("_lease", "hand_lease")
            times: dict[tuple[str, str], list[float]] = {key: [] for key in curves}
            for _ in range(ROUNDS):
                for work, system in curves:
                    spec = {"system": system, "address": address, "work": work, "clients": 1}
                    spec |= {"seconds": bench.effort.beside_seconds, "warm_up": bench.effort.beside_warm_up}
                    times[work, system].append(1e6 / generator.run(spec)["rate"])
            for (work, system), figures in times.items():
                entry = Entry(cases[work], many, "live leases", systems[system][0], "us", figures)
                curves[work, system].append(entry)
    for (_, system), curve in curves.items():
        yield from grown(curve, GROWTH if system == "lease" else None)
