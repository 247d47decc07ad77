"""A streaming pair, and clients in the midst of it when the standby is promoted."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from cluster import Pair, streaming_pair
from load import LEASES, LOCK, TABLES, Load, accepted, stand_in_line, work, write
from notes import not_rising, overlaps
from polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from server import Server

    Figures = Callable[[str], None]

MANY = 200  # grants: when there are as many, the load is under way
SOME = 20
WORKERS = [f"worker-{number}" for number in range(4)]
IN_LINE = [f"captain-{number}" for number in range(3)]


@pytest.fixture
def load(server: Server, tmp_path: Path) -> Iterator[Load]:
    """Clients with a store elsewhere that refuses tokens lower than the highest it has seen."""
    with server.connect("store") as conn:
        conn.execute("DROP TABLE IF EXISTS target, accepted")
        conn.execute(TABLES)
    load = Load(tmp_path, server)
    yield load
    load.stop()


@pytest.fixture
def pair(load: Load, bindir: Path, runas: str | None) -> Iterator[Pair]:
    """A primary and its standby, with tables for guarded writes."""
    assert load  # its clients are waited for when these have been stopped
    with streaming_pair(bindir, runas) as pair:
        with pair.primary.connect("tables") as conn:
            conn.execute(TABLES)
        yield pair


def start(load: Load, conninfo: str, prefix: str = "", standby: Server | None = None) -> None:
    """Start the load, its clients' names with this prefix, and wait until it is under way."""
    begun = time.monotonic()
    for client in WORKERS:
        load.add(prefix + client, work, conninfo, standby)
    for client in IN_LINE:
        load.add(prefix + client, stand_in_line, conninfo)
    until(
        "the load is under way",
        lambda: sum(grant.client.startswith(prefix) for grant in load.grants(since=begun)) >= MANY,
    )
    until("one holds the named lock", lambda: load.count("holds", begun) == 1)


def in_order(conn: psycopg.Connection) -> bool:
    """Whether no write was accepted after one with a higher token."""
    tokens = [[token for token, _ in accepted(conn, name)] for name in LEASES]
    return any(tokens) and all(of_name == sorted(of_name) for of_name in tokens)


def still_held(conn: psycopg.Connection, name: str, token: int) -> bool:
    """Whether the server knows this grant."""
    return conn.execute("SELECT lease_check(%s, %s)", [name, token]).fetchone() == (True,)


@pytest.mark.parametrize(
    ("synchronous_commit", "end"),
    [(None, signal.SIGQUIT), ("on", signal.SIGKILL), ("remote_apply", signal.SIGQUIT)],
    ids=["asynchronous-immediate", "on-SIGKILL", "remote_apply-immediate"],
)
def test_promotion_under_load(
    pair: Pair, load: Load, server: Server, figures: Figures, synchronous_commit: str | None, end: signal.Signals
) -> None:
    if synchronous_commit:
        pair.replicate_synchronously(synchronous_commit)
    start(load, pair.conninfo, standby=pair.standby if synchronous_commit == "remote_apply" else None)

    ended = time.monotonic()
    pair.primary.end(end)
    # Of the lock that went with the server all hear: who held it, and who stood in line.
    until("all in line are told", lambda: load.count("told") == len(IN_LINE))
    told = time.monotonic()
    pair.standby.promote()
    until("the new primary grants", lambda: len(load.grants(pair.standby.port)) >= MANY)
    until("and one holds the named lock", lambda: any(span.server == pair.standby.port for span in load.held()))
    load.stop()

    grants = load.grants()
    assert not not_rising(grants)
    assert not load.count("stale write through the guard")
    with pair.standby.connect("check") as conn, server.connect("check") as elsewhere:
        assert in_order(conn)
        assert in_order(elsewhere)
    # A session that the dying server ends lets go of its lock: the next may be granted it before it is ended in turn.
    assert not overlaps(span for span in load.held() if span.server != pair.primary.port or span.start < ended)
    if synchronous_commit:
        # No worker had another's lease, or none, when it came back with its token.
        assert not load.count("lost")
    assert not load.count("not on the standby")

    of_old = [grant for grant in grants if grant.server == pair.primary.port]
    of_new = [grant for grant in grants if grant.server == pair.standby.port]
    figures(
        f"{len(of_old)} grants by the old primary, {len(of_new)} by the new one, the first "
        f"{min(of_new).answered - ended:.2f} s after the old one's end; acknowledged and lost: {load.count('lost')}"
    )
    figures(f"told that the named lock is lost: all {len(IN_LINE)} within {told - ended:.2f} s")


def test_a_grant_that_the_standby_missed(pair: Pair, server: Server, load: Load) -> None:
    """Two take themselves for the holder until the first hears of it. Only the second can write."""
    assert load  # has made the tables of the store
    with pair.primary.connect("first") as conn:
        [(known,)] = conn.execute("SELECT token FROM lease_acquire('known', '1 h')")
        pair.until_replayed()
        pair.cut()
        [(missed,)] = conn.execute("SELECT token FROM lease_acquire('missed', '1 h')")
        pair.primary.end(signal.SIGKILL)
    pair.standby.promote()
    with pair.standby.connect("second") as conn, server.connect("store") as elsewhere:
        acquire = "SELECT acquired, token, holder FROM lease_acquire(%s, '1 h')"
        assert conn.execute(acquire, ["known"]).fetchone() == (False, None, "first")
        [(acquired, later, _)] = conn.execute(acquire, ["missed"])
        assert acquired
        assert later > missed > known
        assert write(elsewhere, "missed", missed, "first")
        assert write(elsewhere, "missed", later, "second")
        assert not write(elsewhere, "missed", missed, "first")
    with pair.standby.connect("first") as conn:
        conn.execute("SELECT lease_renew('known', %s)", [known])
        with pytest.raises(psycopg.errors.ObjectInUse):
            conn.execute("SELECT lease_renew('missed', %s)", [missed])
        with pytest.raises(psycopg.errors.ObjectInUse):
            conn.execute("SELECT lease_guard('missed', %s)", [missed])


def test_old_primary_alive_asynchronous(pair: Pair, load: Load, server: Server, figures: Figures) -> None:
    """Both go on to grant. Tokens tell who is of the past, elsewhere too; named locks don't."""
    start(load, pair.primary.conninfo, "old-")
    pair.cut()
    cut = time.monotonic()
    with pair.primary.superuser() as conn:
        # More than the sequence's WAL is ahead of it: it is the new timeline that makes the new tokens higher.
        conn.execute("SELECT nextval('_lease_token') FROM generate_series(1, 1000)")
    until("the old primary grants", lambda: len(load.grants(pair.primary.port, since=cut)) >= MANY)
    pair.standby.promote()
    promoted = time.monotonic()
    start(load, pair.standby.conninfo, "new-")
    until("the old primary goes on", lambda: len(load.grants(pair.primary.port, since=promoted)) >= MANY)
    until("its clients are refused elsewhere", lambda: load.count("refused elsewhere") >= SOME)
    load.stop()

    of_old, of_new = load.grants(pair.primary.port), load.grants(pair.standby.port)
    assert not not_rising(of_old)
    assert not not_rising(of_new)
    assert max(grant.token for grant in of_old) < min(grant.token for grant in of_new)
    assert not load.count("stale write through the guard")
    highest_of_old = max(grant.token for grant in of_old)
    with pair.standby.connect("check") as conn, server.connect("check") as elsewhere:
        assert in_order(conn)
        assert in_order(elsewhere)
        for name in LEASES:
            # Once the new primary's client has written, no client of the old one has.
            writers = [writer for _, writer in accepted(elsewhere, name)]
            new = [writer.startswith("new-") for writer in writers]
            assert new == sorted(new)
        lost = [grant for grant in of_old if grant.asked > cut]
        assert not any(still_held(conn, grant.name, grant.token) for grant in lost)
        kept = guarded_writes(conn, highest_of_old)
    with pair.primary.connect("check") as conn:
        discarded = guarded_writes(conn, highest_of_old) - kept
    # A lock that is not replicated is held by one client of each.
    both = {pair.primary.port, pair.standby.port}
    assert any({first.server, second.server} == both for first, second in overlaps(load.held()))
    figures(
        f"{len(of_old)} grants by the old primary, {len(lost)} of them after the cut and lost, with {discarded} guarded "
        f"writes; {len(of_new)} by the new one; refused elsewhere: {load.count('refused elsewhere')}"
    )


def guarded_writes(conn: psycopg.Connection, token: int) -> int:
    """How many writes with tokens up to this one a server has."""
    [(writes,)] = conn.execute("SELECT count(*) FROM accepted WHERE token <= %s", [token])
    return int(writes)


def test_old_primary_alive_synchronous(pair: Pair, load: Load, server: Server, figures: Figures) -> None:
    """What the standby does not have is not acknowledged: the old primary's clients stand still."""
    pair.replicate_synchronously("on")
    start(load, pair.primary.conninfo, "old-")
    pair.cut()
    cut = time.monotonic()
    pair.standby.promote()
    start(load, pair.standby.conninfo, "new-")
    with pair.primary.superuser() as conn:
        stuck = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
        until("all its workers wait", lambda: conn.execute(stuck).fetchone() == (len(WORKERS),))
        assert not load.grants(pair.primary.port, since=cut)
    # A named lock writes nothing, and is granted by both.
    for node in (pair.primary, pair.standby):
        with node.connect("both") as conn:
            assert conn.execute("SELECT named_lock('of both', '0'), named_lock(%s, '0')", [LOCK]).fetchone() == (
                True,
                False,
            )
    # A cancel ends that wait with an answer that is good for nothing: the server warns.
    token, warnings = acquire_cancelled(pair, "cancelled")
    with pair.standby.connect("check") as conn:
        assert warnings == ["01000 canceling wait for synchronous replication due to user request"]
        assert not still_held(conn, "cancelled", token)

    told = load.count("told")
    pair.primary.end(signal.SIGQUIT)
    until("all in line are told", lambda: load.count("told") == told + len(IN_LINE))
    load.stop()

    of_old, of_new = load.grants(pair.primary.port), load.grants(pair.standby.port)
    assert not not_rising(of_old + of_new)
    assert max(grant.token for grant in of_old) < min(grant.token for grant in of_new)
    assert not load.count("stale write through the guard")
    assert not load.count("lost")
    with pair.standby.connect("check") as conn, server.connect("check") as elsewhere:
        assert in_order(conn)
        assert in_order(elsewhere)
    figures(
        f"{len(of_old)} grants by the old primary, none after the cut; {len(of_new)} by the new one; "
        f"refused elsewhere: {load.count('refused elsewhere')}"
    )


def acquire_cancelled(pair: Pair, name: str) -> tuple[int, list[str]]:
    """Acquire a lease at the old primary and cancel its wait for the standby: the token, and what it was warned of."""
    warnings: list[str] = []
    with pair.primary.superuser() as other, pair.primary.connect("cancelled") as conn, ThreadPoolExecutor(1) as pool:
        conn.add_notice_handler(lambda diag: warnings.append(f"{diag.sqlstate} {diag.message_primary}"))
        acquiring = pool.submit(conn.execute, "SELECT token FROM lease_acquire(%s, '1 min')", [name])
        try:
            waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'SyncRep'"
            until("it waits", lambda: other.execute(waits, [conn.info.backend_pid]).fetchone() is not None)
        finally:
            other.execute("SELECT pg_cancel_backend(%s)", [conn.info.backend_pid])
        [(token,)] = acquiring.result(60).fetchall()
    return token, warnings
