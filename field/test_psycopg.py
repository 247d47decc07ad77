"""The examples for psycopg 3: locks and leases, with threads and with asyncio."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

import psycopg_lease
import psycopg_lease_async
import psycopg_locks
import psycopg_locks_async
from polling import PATIENCE, until
from pooler import pooler
from views import held, lease_owner, waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server import Server

SOON = timedelta(milliseconds=200)
TTL = timedelta(seconds=2)


@pytest.fixture
def conn(server: Server) -> Iterator[psycopg.Connection]:
    with server.connect("worker") as conn:
        yield conn


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Nobody can connect, though the port is open: the postmaster stands still. Sessions go on."""
    postmaster = int((server.data / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(postmaster, signal.SIGCONT)


# Locks ----------------------------------------------------------------------------------------------------------------


def test_a_transaction_lock_ends_with_its_block(conn: psycopg.Connection, other: psycopg.Connection) -> None:
    with psycopg_locks.transaction_lock(conn, "report", SOON):
        assert held(other) == [("transaction", "report")]
        taking = psycopg_locks.transaction_lock(other, "report", SOON)
        with pytest.raises(psycopg.errors.LockNotAvailable, match="report") as refused, taking:
            pytest.fail("two hold it")
        assert refused.value.sqlstate == "55P03"
        assert "worker" in (refused.value.diag.message_detail or "")
    with pytest.raises(ZeroDivisionError), psycopg_locks.transaction_lock(conn, "report", SOON):
        raise ZeroDivisionError
    with psycopg_locks.transaction_lock(other, "report", SOON):
        pass


def test_a_session_lock_spans_transactions(conn: psycopg.Connection, other: psycopg.Connection) -> None:
    with psycopg_locks.session_lock(conn, "report", SOON):
        with pytest.raises(psycopg.errors.DivisionByZero), conn.transaction():
            conn.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.LockNotAvailable), psycopg_locks.session_lock(other, "report", SOON):
            pytest.fail("two hold it")
        with psycopg_locks.session_lock(conn, "report", SOON):  # re-entrant
            pass
        assert held(other) == [("session", "report")]
    assert held(other) == []


def test_a_session_lock_whose_session_is_ended(conn: psycopg.Connection, other: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.AdminShutdown), psycopg_locks.session_lock(conn, "report", SOON):
        other.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
        conn.execute("SELECT 1")


def test_async_locks(server: Server, other: psycopg.Connection) -> None:
    async def play() -> None:
        async with await psycopg.AsyncConnection.connect(server.conninfo, autocommit=True) as conn:
            async with psycopg_locks_async.transaction_lock(conn, "report", SOON):
                assert held(other) == [("transaction", "report")]
            async with psycopg_locks_async.session_lock(conn, "report", SOON):
                assert held(other) == [("session", "report")]
            other.execute("SELECT named_lock('report')")
            for lock in (psycopg_locks_async.transaction_lock, psycopg_locks_async.session_lock):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    async with lock(conn, "report", SOON):
                        pytest.fail("two hold it")

    asyncio.run(play())


# What a task may wait in: each is given a connection, a name and what to do once it is granted.


async def in_transaction_lock(server: Server, granted: asyncio.Event) -> None:
    async with await psycopg.AsyncConnection.connect(server.conninfo, autocommit=True) as conn:
        await in_lock(psycopg_locks_async.transaction_lock(conn, "report"), conn, granted)


async def in_session_lock(server: Server, granted: asyncio.Event) -> None:
    async with await psycopg.AsyncConnection.connect(server.conninfo, autocommit=True) as conn:
        await in_lock(psycopg_locks_async.session_lock(conn, "report"), conn, granted)


async def in_lock(lock: object, conn: psycopg.AsyncConnection, granted: asyncio.Event) -> None:
    try:
        async with lock:
            granted.set()
            await asyncio.sleep(PATIENCE)
    finally:
        # The connection is as good as before, and not what gives the lock back.
        cursor = await conn.execute("SELECT named_lock_held('report')")
        assert await cursor.fetchone() == (0,)


async def in_lease(server: Server, granted: asyncio.Event) -> None:
    async def work(_token: int) -> None:
        granted.set()
        await asyncio.sleep(PATIENCE)

    await psycopg_lease_async.run_with_lease(server.conninfo, "report", timedelta(minutes=1), work)


waits = pytest.mark.parametrize("wait", [in_transaction_lock, in_session_lock, in_lease])


@waits
@pytest.mark.parametrize("granted_first", [False, True], ids=["waiting", "as it is granted"])
def test_a_cancelled_waiter_leaves_nothing(
    server: Server, other: psycopg.Connection, wait: object, granted_first: bool
) -> None:
    holder = "lease" if wait is in_lease else "lock"

    async def play() -> None:
        if holder == "lease":
            [(token,)] = other.execute("SELECT token FROM lease_acquire('report', '1 min')")
        else:
            other.execute("SELECT named_lock('report')")
        granted = asyncio.Event()
        task = asyncio.ensure_future(wait(server, granted))
        while waiting(other) == 0:
            await asyncio.sleep(0.01)
        if granted_first:
            # The loop stands still meanwhile: the grant has come when the task is cancelled, and it has not seen it.
            if holder == "lease":
                other.execute("SELECT lease_release('report', %s)", [token])
                until("the lease is granted", lambda: lease_owner(other, "report") == "demo")
            else:
                other.execute("SELECT named_unlock('report')")
                until("the lock is granted", lambda: waiting(other) == 0 and held(other))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not granted.is_set()
        assert waiting(other) == 0
        if granted_first:
            assert held(other) == []
        elif holder == "lease":
            other.execute("SELECT lease_release('report', %s)", [token])

    asyncio.run(play())


@waits
def test_a_cancelled_holder_gives_back(server: Server, other: psycopg.Connection, wait: object) -> None:
    async def play() -> None:
        granted = asyncio.Event()
        task = asyncio.ensure_future(wait(server, granted))
        await asyncio.wait_for(granted.wait(), PATIENCE)
        assert len(held(other)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert held(other) == []

    asyncio.run(play())


# Leases ---------------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_while_the_work_takes_longer(
    server: Server, conn: psycopg.Connection, other: psycopg.Connection
) -> None:
    conn.execute("CREATE TEMP TABLE target (token bigint)")
    with psycopg_lease.held_lease(server.conninfo, "import", TTL, conn.cancel_safe) as lease:
        conn.execute("SELECT pg_sleep(%s)", [2 * TTL.total_seconds()])
        with conn.transaction():
            lease.guard(conn)
            conn.execute("INSERT INTO target VALUES (%s)", [lease.token])
        lease.check()
        assert not other.execute("SELECT acquired FROM lease_acquire('import', '1 s')").fetchone()[0]
    assert lease_owner(other, "import") is None


def test_a_lost_lease_stops_the_work(server: Server, conn: psycopg.Connection, other: psycopg.Connection) -> None:
    holding = psycopg_lease.held_lease(server.conninfo, "import", TTL, conn.cancel_safe)
    with pytest.raises(psycopg_lease.LeaseLost), holding as lease:
        other.execute("SELECT lease_break('import')")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState), conn.transaction():
            lease.guard(conn)  # this one knows it at once
        conn.execute("SELECT pg_sleep(%s)", [PATIENCE])
    assert lease.lost
    # Somebody else has it: no renewal, no guard, and no release of what is not ours any more.
    with psycopg_lease.held_lease(server.conninfo, "import", TTL) as next_lease:
        assert next_lease.token > lease.token
        with pytest.raises(psycopg.errors.ObjectInUse), conn.transaction():
            lease.guard(conn)
        lease.release()
        next_lease.guard(conn)


def test_a_statement_cancelled_for_another_reason_is_not_a_lost_lease(
    server: Server, conn: psycopg.Connection, other: psycopg.Connection
) -> None:
    holding = psycopg_lease.held_lease(server.conninfo, "import", TTL, conn.cancel_safe)
    with pytest.raises(psycopg.errors.QueryCanceled), holding:
        conn.execute("SET statement_timeout = '10 ms'")
        conn.execute("SELECT pg_sleep(%s)", [PATIENCE])
    assert lease_owner(other, "import") is None


def test_a_lease_whose_renewal_hangs_is_lost_when_its_time_is_over(server: Server, other: psycopg.Connection) -> None:
    lost = threading.Event()
    with psycopg_lease.held_lease(server.conninfo, "import", TTL, lost.set) as lease:
        with stopped(server):
            assert lost.wait(PATIENCE)
        with pytest.raises(psycopg_lease.LeaseLost):
            lease.check()
    until("it has ended", lambda: lease_owner(other, "import") is None)


def test_async_work_under_a_lease(server: Server, other: psycopg.Connection) -> None:
    async def work(token: int) -> int:
        await asyncio.sleep(2 * TTL.total_seconds())
        async with await psycopg.AsyncConnection.connect(server.conninfo) as conn:
            await conn.execute("SELECT lease_guard('import', %s)", [token])
        return token

    async def failing(_token: int) -> None:
        raise ZeroDivisionError

    assert asyncio.run(psycopg_lease_async.run_with_lease(server.conninfo, "import", TTL, work)) > 0
    assert lease_owner(other, "import") is None
    with pytest.raises(ZeroDivisionError):
        asyncio.run(psycopg_lease_async.run_with_lease(server.conninfo, "import", TTL, failing))
    assert lease_owner(other, "import") is None


@pytest.mark.parametrize("how", ["broken", "renewal hangs"])
def test_async_work_is_cancelled_when_its_lease_is_lost(server: Server, other: psycopg.Connection, how: str) -> None:
    cancelled = []

    async def work(_token: int) -> None:
        try:
            if how == "broken":
                other.execute("SELECT lease_break('import')")
                await asyncio.sleep(PATIENCE)
            with stopped(server):
                await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            cancelled.append(how)
            raise

    with pytest.raises(psycopg_lease_async.LeaseLost):
        asyncio.run(psycopg_lease_async.run_with_lease(server.conninfo, "import", TTL, work))
    assert cancelled == [how]
    until("it has ended", lambda: lease_owner(other, "import") is None)


# Behind a transaction pooler ------------------------------------------------------------------------------------------


def test_behind_a_transaction_pooler(server: Server, other: psycopg.Connection) -> None:
    """Transaction locks and leases over as few sessions as there are clients, while the pooler is restarted."""
    ttl = timedelta(seconds=6)

    def remaining() -> float:
        """How much of the TTL is left."""
        [(left,)] = other.execute("SELECT remaining FROM lease_holder('import')")
        return float(left / ttl)

    def write(conninfo: str, lease: psycopg_lease.Lease) -> None:
        with psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as conn:
            for _ in range(10):
                with psycopg_locks.transaction_lock(conn, "report", SOON):
                    lease.guard(conn)
                    assert ("transaction", "report") in held(other)
            with pytest.raises(psycopg.errors.ObjectInUse), conn.transaction():
                conn.execute("SELECT lease_guard('import', %s)", [lease.token - 1])

    with pooler(server, "transaction") as pgbouncer:
        with psycopg_lease.held_lease(pgbouncer.conninfo, "import", ttl) as lease:
            write(pgbouncer.conninfo, lease)
            pgbouncer.stop()
            until("a renewal has failed", lambda: remaining() < 0.6)
            pgbouncer.start()
            until("a renewal has come through", lambda: remaining() > 0.6)
            write(pgbouncer.conninfo, lease)
        assert held(other) == []

        async def work(token: int) -> int:
            await asyncio.sleep(TTL.total_seconds())
            conn = await psycopg.AsyncConnection.connect(pgbouncer.conninfo, prepare_threshold=None)
            async with conn, psycopg_locks_async.transaction_lock(conn, "report", SOON):
                await conn.execute("SELECT lease_guard('import', %s)", [token])
            return token

        assert asyncio.run(psycopg_lease_async.run_with_lease(pgbouncer.conninfo, "import", TTL, work)) > lease.token
