"""Named locks with psycopg 3, as context managers.

`transaction_lock` for work that is one transaction: it needs no giving back and works behind every pooler.
`session_lock` for work of several transactions on one connection; not behind a transaction pooler, where a lease is right.
In READ COMMITTED, the default, statements after the lock see what its last holder has committed; in a stricter isolation
level the transaction's snapshot is older than its lock.
Both raise psycopg.errors.LockNotAvailable (55P03) when the timeout has passed; its DETAIL says who holds the lock.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    import psycopg


@contextmanager
def transaction_lock(conn: psycopg.Connection, name: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Run the block as a transaction that holds the lock.

    Within a transaction that is open already the block is a savepoint, and the lock is held until the outer one ends.
    """
    with conn.transaction():
        conn.execute("SELECT named_xact_lock_strict(%s, %s)", [name, timeout])
        yield


@contextmanager
def session_lock(conn: psycopg.Connection, name: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Hold the lock for the block. `conn` is in autocommit mode; transactions are the block's own affair."""
    conn.execute("SELECT named_lock_strict(%s, %s)", [name, timeout])
    try:
        yield
    finally:
        if not conn.closed:  # the lock ended with its session
            conn.execute("SELECT named_unlock(%s)", [name])
