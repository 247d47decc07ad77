"""Named locks and leases in the transactions of SQLAlchemy 2.

    with Session(engine) as session, session.begin():
        lock_transaction(session, f"account:{pk}", timedelta(seconds=5))
        account = session.get(Account, pk)
        ...

Session locks and leases, whose calls are no part of a transaction, are better called on a connection of their own, in
AUTOCOMMIT mode: a Session may change its connection with each transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import func, select

if TYPE_CHECKING:
    from datetime import timedelta

    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.orm import Session


def lock_transaction(session: Session, name: str, timeout: timedelta | None = None) -> None:
    """Hold the lock to the end of the transaction, or of the savepoint if that is rolled back.

    What was read before may be out of date by then: `session.expire_all()`, or lock first. On a timeout: OperationalError,
    with the holder in its text.
    """
    session.execute(select(func.named_xact_lock_strict(name, timeout)))


def guard(session: Session, name: str, token: int) -> None:
    """Let the transaction write only if the lease is held: an error (55006, 55000) else, and then it is to the end."""
    session.execute(select(func.lease_guard(name, token)))


def sqlstate(error: DBAPIError) -> str | None:
    """PostgreSQL's code for an error."""
    return getattr(error.orig, "sqlstate", None)
