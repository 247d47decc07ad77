"""A lease with psycopg 3 and asyncio: work runs while a task renews the lease, and is cancelled when it is lost.

    await run_with_lease(conninfo, "import:orders", timedelta(seconds=30), import_orders)

`import_orders(token)` has `SELECT lease_guard('import:orders', token)` in each transaction that writes: a task that stands
still cannot be cancelled either. For Python 3.9 and later; asyncio.TaskGroup (3.11) would add nothing here, where the end
of either task ends the other.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import psycopg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from datetime import timedelta

T = TypeVar("T")


class LeaseLost(Exception):
    """The lease has ended or is somebody else's: stop, and write nothing more."""


async def run_with_lease(conninfo: str, name: str, ttl: timedelta, work: Callable[[int], Coroutine[Any, Any, T]]) -> T:
    """Wait for a lease, run `work(token)` under it and give it back; what the work returned.

    If the lease is lost, the work is cancelled, and this raises LeaseLost when the work has ended.
    """
    token = await acquire(conninfo, name, ttl)
    renewing = asyncio.ensure_future(keep_renewing(conninfo, name, token, ttl))
    working = asyncio.ensure_future(work(token))
    try:
        await asyncio.wait({renewing, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise LeaseLost(name)
        return working.result()
    finally:
        for task in (working, renewing):  # the lease is kept while the work winds up
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        with suppress(psycopg.OperationalError):  # if not by us, it ends by itself
            async with connection(conninfo) as conn:
                await conn.execute("SELECT lease_release(%s, %s)", [name, token])


@asynccontextmanager
async def connection(conninfo: str) -> AsyncIterator[psycopg.AsyncConnection]:
    """A connection for one statement: none is kept that could break unnoticed. A pool's `connection()` does as well."""
    # No prepared statements: behind a transaction pooler the next one may run on another connection.
    connecting = psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    async with await connecting as conn:
        yield conn


async def acquire(conninfo: str, name: str, ttl: timedelta) -> int:
    """Wait for the lease; its token. Cancelled, it leaves nothing held or queued."""
    async with connection(conninfo) as conn:
        acquiring = asyncio.ensure_future(conn.execute("CALL lease_acquire_wait(%s, %s)", [name, ttl]))
        try:
            [(token,)] = await (await asyncio.shield(acquiring)).fetchall()
        except asyncio.CancelledError:
            # A cancel and the grant may cross on their ways: what the statement says is so.
            await conn.cancel_safe()
            with suppress(psycopg.Error):
                [(token,)] = await (await acquiring).fetchall()
                await conn.execute("SELECT lease_release(%s, %s)", [name, token])
            raise
    return int(token)


async def keep_renewing(conninfo: str, name: str, token: int, ttl: timedelta) -> None:
    """Renew the lease at once and then at each third of its TTL, so that one renewal may fail; return when it is lost."""

    async def renew() -> float:
        sent = time.monotonic()  # the server counts from a little later on
        async with connection(conninfo) as conn:
            await conn.execute("SELECT lease_renew(%s, %s)", [name, token])
        return sent + ttl.total_seconds()

    deadline = time.monotonic() + ttl.total_seconds()
    while True:
        renewal = asyncio.ensure_future(renew())
        try:
            # Not wait_for(): that would wait on for a renewal that hangs.
            await asyncio.wait({renewal}, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            hangs = renewal.cancel()
        if hangs:
            return
        error = renewal.exception()
        if isinstance(error, (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState)):  # 55006, 55000
            return
        if error is None:
            deadline = renewal.result()
            await asyncio.sleep(ttl.total_seconds() / 3)
        else:
            await asyncio.sleep(ttl.total_seconds() / 30)
