"""Named locks in Django.

    with named_xact_lock(f"account:{pk}", timeout=timedelta(seconds=5)):
        account = Account.objects.get(pk=pk)
        ...

On a timeout: django.db.OperationalError, with `sqlstate(error) == "55P03"` and the holder in the text.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS, connections, transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django.db import Error


@contextmanager
def named_xact_lock(name: str, timeout: timedelta | None = None, using: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """Run the block as a transaction that holds the lock. It works behind every pooler.

    In a transaction that is open already (ATOMIC_REQUESTS, for one) the block is a savepoint: the lock is held until the
    outer transaction ends, or the savepoint is rolled back. Read what it protects after it, not before.
    """
    with transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT named_xact_lock_strict(%s, %s)", [name, timeout])
        yield


@contextmanager
def named_lock(name: str, timeout: timedelta | None = None, using: str = DEFAULT_DB_ALIAS) -> Iterator[bool]:
    """Hold the lock for the block, over its transactions; the block gets whether it has it.

    For programs with a connection of their own, such as management commands: not behind a transaction pooler, and not in
    a transaction, since one that has failed could not give the lock back.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        raise transaction.TransactionManagementError("in a transaction, use named_xact_lock()")
    with connection.cursor() as cursor:
        cursor.execute("SELECT named_lock(%s, %s)", [name, timeout])
        [acquired] = cursor.fetchone()
    session = connection.connection
    try:
        yield acquired
    finally:
        # If it broke meanwhile, the lock ended with it, and Django may have made a new connection.
        if acquired and connection.connection is session and not session.closed:
            with connection.cursor() as cursor:
                cursor.execute("SELECT named_unlock(%s)", [name])


class OnlyOneCommand(BaseCommand):
    """A management command that runs in one place at a time; elsewhere it ends at once, and well.

    One that starts after that has ended runs it again. To keep out late ones too, of a cron job on several machines for
    example, take a lease and release it with `keep_for`.
    """

    lock_name: str

    def handle(self, *args: Any, **options: Any) -> str | None:
        """Do it, or say that somebody else does."""
        with named_lock(self.lock_name, timedelta(0), options.get("database") or DEFAULT_DB_ALIAS) as acquired:
            if acquired:
                return self.handle_alone(*args, **options)
        return f"{self.lock_name}: runs elsewhere"

    def handle_alone(self, *args: Any, **options: Any) -> str | None:
        """What the command does, in place of handle()."""
        raise NotImplementedError


def sqlstate(error: Error) -> str | None:
    """PostgreSQL's code for an error: Django's exceptions have it in the one that they were made from."""
    return getattr(error.__cause__, "sqlstate", None)
