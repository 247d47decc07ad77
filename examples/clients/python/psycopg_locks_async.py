"""Named locks with psycopg 3 and asyncio: `psycopg_locks` for async connections, where a waiting task may be cancelled.

Whenever the cancel comes, nothing stays held or queued. `asyncio.wait_for()` and `asyncio.timeout()` (Python 3.11) cancel
too; a timeout given to the server instead ends in an error that says who holds the lock.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import timedelta


@asynccontextmanager
async def transaction_lock(
    conn: psycopg.AsyncConnection, name: str, timeout: timedelta | None = None
) -> AsyncIterator[None]:
    """Run the block as a transaction that holds the lock.

    Within a transaction that is open already the block is a savepoint, and the lock is held until the outer one ends.
    """
    async with conn.transaction():
        await conn.execute("SELECT named_xact_lock_strict(%s, %s)", [name, timeout])
        yield


@asynccontextmanager
async def session_lock(
    conn: psycopg.AsyncConnection, name: str, timeout: timedelta | None = None
) -> AsyncIterator[None]:
    """Hold the lock for the block. `conn` is in autocommit mode; transactions are the block's own affair."""
    acquiring = asyncio.ensure_future(conn.execute("SELECT named_lock_strict(%s, %s)", [name, timeout]))
    try:
        await asyncio.shield(acquiring)
    except asyncio.CancelledError:
        # A cancel and the grant may cross on their ways: what the statement says is so.
        await conn.cancel_safe()
        with suppress(psycopg.Error):
            await acquiring
            await conn.execute("SELECT named_unlock(%s)", [name])
        raise
    try:
        yield
    finally:
        if not conn.closed:  # the lock ended with its session
            await conn.execute("SELECT named_unlock(%s)", [name])
