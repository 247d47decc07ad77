"""Leases beside what one writes by hand: a table whose rows expire, and statements by its primary key."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import wire
from common import NAMED, NATIVE, Bench, Side, execute, wait_until
from stage import crew_of
from table import RATIO, Row, Target, compared, number, percentile, spread, stated

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

CLIENTS = (1, 16)
WAKE_UP_TARGET = Target("<=", 100, "ms")
IDS_TARGET = Target("<=", 0, "ids")
REFUSED = 1_000  # tries whose transaction ids are counted

BY_HAND = """
CREATE SEQUENCE IF NOT EXISTS hand_token CACHE 1;
CREATE TABLE IF NOT EXISTS hand_lease (
    name text PRIMARY KEY,
    token bigint NOT NULL,
    owner text NOT NULL,
    expires_at timestamptz NOT NULL
);
"""

# pgbench keeps a client's token from one transaction to the next; 0 until it has one.
NO_TOKEN = ("--define=token=0", "--define=by_hand=0")

ACQUIRE_BY_HAND = """
insert into hand_lease as held (name, token, owner, expires_at)
values ({name}, nextval('hand_token'), 'bench', clock_timestamp() + '1 h')
on conflict (name) do update
set token = excluded.token, owner = excluded.owner, expires_at = excluded.expires_at
where held.expires_at < clock_timestamp()
returning token"""
ACQUIRE = {
    NATIVE: ACQUIRE_BY_HAND.format(name="'bench:' || :client_id") + " as by_hand \\gset\n",
    NAMED: "select token from lease_acquire('bench:' || :client_id, '1 h', owner => 'bench') \\gset\n",
}
RELEASE = {
    NATIVE: "delete from hand_lease where name = 'bench:' || :client_id and token = :by_hand;\n",
    NAMED: "select lease_release('bench:' || :client_id, :token);\n",
}
# What a client does once.
FIRST = {
    NATIVE: f"\\if :by_hand = 0\n{ACQUIRE[NATIVE]}\\endif\n",
    NAMED: f"\\if :token = 0\n{ACQUIRE[NAMED]}\\endif\n",
}
# An UPDATE without RETURNING tells how many rows there were; a renewal without columns, by its error, that it is lost.
RENEW = {
    NATIVE: "update hand_lease set expires_at = clock_timestamp() + '1 h' where name = 'bench:' || :client_id;\n",
    NAMED: "select from lease_renew('bench:' || :client_id, :token);\n",
}
# A name without a colon: pgbench would take what follows it for a variable.
TRY = {
    NATIVE: "select token, owner, expires_at from hand_lease where name = 'held';\n",
    NAMED: "select token, holder, expires_at from lease_acquire('held', '1 h');\n",
}
GUARD = {
    NATIVE: "select pg_advisory_xact_lock_shared(hashtextextended('bench:' || :client_id, 0));\n",
    NAMED: "select lease_guard('bench:' || :client_id, :token);\n",
}


CONTESTS = (
    wire.Contest(
        "acquire; release (by hand: INSERT ON CONFLICT; DELETE)",
        {side: ACQUIRE[side] + RELEASE[side] for side in (NATIVE, NAMED)},
        Target(">=", 0.95),
    ),
    wire.Contest(
        "renew (by hand: UPDATE)",
        {side: FIRST[side] + RENEW[side] for side in (NATIVE, NAMED)},
        Target(">=", 0.95),
    ),
    wire.Contest("refused try (by hand: SELECT)", TRY, Target(">=", 0.8)),
    wire.Contest(
        "guard (by hand: pg_advisory_xact_lock_shared)",
        {side: FIRST[side] + GUARD[side] for side in (NATIVE, NAMED)},
        Target(">=", 0.85),
    ),
)

WAIT = {
    NATIVE: "SELECT pg_advisory_lock(hashtextextended('bench:wake', 0))",
    NAMED: "SELECT token FROM lease_acquire('bench:wake', '1 h', timeout => NULL)",
}
GIVE = {
    NATIVE: "SELECT pg_advisory_unlock(hashtextextended('bench:wake', 0))",
    NAMED: "SELECT lease_release('bench:wake', %s)",
}


class Hold(NamedTuple):
    """When a client had its turn, and when it set out to end it; without a next one that was waiting, `left` is None."""

    had: float
    left: float | None


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Leases, durable, each client its own, beside statements by hand (under native): pgbench -M prepared, "
        f"{effort.wire_rounds} rounds; 1 client: both mixed, {effort.wire_seconds * 4:g} s each; 16 clients: native, "
        f"named, named, native, {effort.wire_seconds:g} s each"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Rates with one client and with sixteen, the refused try's transaction ids, and how soon a waiter wakes."""
    with closing(bench.server.connect("bench leases")) as conn:
        execute(conn, BY_HAND)
        [(held,)] = execute(conn, "SELECT acquired FROM lease_acquire('held', '1 day')")
        if not held:
            raise RuntimeError("a lease that nobody has was refused")

        def clear() -> None:
            """Begin anew: no leases but the one that stays held, and no dead rows."""
            execute(conn, "SELECT lease_break('bench:' || client) FROM generate_series(0, %s) AS client", max(CLIENTS))
            execute(conn, "DELETE FROM hand_lease")
            execute(conn, "INSERT INTO hand_lease VALUES ('held', 0, 'bench', clock_timestamp() + '1 day')")
            bench.server.vacuum("_lease", "hand_lease")

        for contest in CONTESTS:
            for clients in CLIENTS:
                script = contest.scripts.__getitem__
                if clients == 1:
                    pairs = wire.mixed(bench, script, NO_TOKEN, clear)
                else:
                    pairs = wire.throughput(bench, script, clients, NO_TOKEN, clear)
                what = f"{contest.what}: {clients} client{'s' * (clients > 1)}"
                yield compared(what, "tx/s", pairs, contest.target)
        native, named = (ids_assigned(bench, conn, TRY[side]) for side in (NATIVE, NAMED))
        yield stated(f"transaction ids assigned in {REFUSED:,} refused tries", "ids", native, named, IDS_TARGET)
    yield from wake_ups(bench)


def ids_assigned(bench: Bench, conn: psycopg.Connection, script: str) -> int:
    """How many transaction ids the whole server has assigned while a script ran."""
    before = next_id(conn)
    wire.pgbench(bench.server, [script], 1, REFUSED)
    return next_id(conn) - before


def next_id(conn: psycopg.Connection) -> int:
    """The transaction id after the last that has been in use; to ask takes none."""
    [(xmax,)] = conn.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    return int(xmax)


def wake_ups(bench: Bench) -> Iterator[Row]:
    """Two clients hand a lease to and fro: from before one's release to when the other has its answer."""
    seen: dict[Side, list[float]] = {NATIVE: [], NAMED: []}
    for side in (NATIVE, NAMED, NAMED, NATIVE):
        seen[side] += handed_over(bench, side)
    native, named = seen[NATIVE], seen[NAMED]
    what = "a waiter has it after the release (native: pg_advisory_unlock)"
    ratio = number(statistics.median(named) / statistics.median(native), RATIO)
    yield Row(f"{what}: median", "ms", spread(native, "ms"), spread(named, "ms"), ratio)
    yield stated(f"{what}: p99", "ms", percentile(native, 99), percentile(named, 99), WAKE_UP_TARGET)


def handed_over(bench: Bench, side: Side) -> list[float]:
    """Milliseconds of each hand-over."""
    with crew_of(bench.server) as crew:
        for client in range(2):
            crew.add(f"bench hand {client}", hand_over, side, bench.effort.wake_ups // 4)
        crew.go()
        answers = crew.answers()
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError("; ".join(errors))
    holds = sorted((Hold(*hold) for answer in answers for hold in answer.value), key=lambda hold: hold.had)
    return [1e3 * (after.had - before.left) for before, after in zip(holds, holds[1:]) if before.left is not None]


def hand_over(conn: psycopg.Connection, side: Side, times: int) -> list[tuple[float, float | None]]:
    """Wait for a turn, wait until the other waits, end the turn: so many times. The clock is the machine's."""
    holds: list[tuple[float, float | None]] = []
    for turn in range(times + 1):
        [(token,)] = conn.execute(WAIT[side].encode(), prepare=True)
        had = time.monotonic()
        left = None
        if turn < times:  # else the other may have gone
            wait_until("the other waits", lambda: conn.execute("SELECT FROM lock_waiters").rowcount == 1)
            time.sleep(0.002)  # until it sleeps
            left = time.monotonic()
        conn.execute(GIVE[side].encode(), [token] if side == NAMED else None, prepare=True)
        holds.append((had, left))
    return holds
