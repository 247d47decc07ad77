"""Alembic's env.py for programs that migrate when they start: of several at once one migrates, the others wait.

The lock is taken before Alembic looks which revision is there, on the very connection that migrates. So it stays until the
server is done with the last statement even if this process is killed, and is gone with the connection if that breaks: no
other process ever begins beside one that still works.
"""

from __future__ import annotations

import os
from datetime import timedelta
from logging.config import fileConfig

from alembic import context
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

LOCK = "migrate:app"
TIMEOUT = timedelta(minutes=10)

target_metadata = None  # your models' MetaData, for --autogenerate


def wait_for_the_others(connection: Connection) -> None:
    """Take the lock for this session, and hold no snapshot while waiting for it.

    A session that waits in `SELECT pg_advisory_lock(…)` has a snapshot; CREATE INDEX CONCURRENTLY, run by the one that
    migrates, waits until that is gone, and so the two would wait for each other. Hence CALL, in autocommit mode.
    """
    connection.execution_options(isolation_level="AUTOCOMMIT")
    call = text("CALL named_lock_wait(:name, timeout => :timeout)")
    if not connection.scalar(call, {"name": LOCK, "timeout": TIMEOUT}):
        raise TimeoutError(f"another migration has been running for {TIMEOUT}")
    connection.commit()
    connection.execution_options(isolation_level=connection.default_isolation_level)


def migrate() -> None:
    """Bring the schema up to date."""
    engine = create_engine(
        os.environ["DATABASE_URL"], poolclass=NullPool
    )  # to close is to end the session, and the lock
    with engine.connect() as connection:
        wait_for_the_others(connection)
        # One transaction for each, for those that leave it by autocommit_block().
        context.configure(connection=connection, target_metadata=target_metadata, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()


def print_sql() -> None:
    """`alembic upgrade --sql`: no connection, no lock."""
    context.configure(dialect_name="postgresql", target_metadata=target_metadata, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)
if context.is_offline_mode():
    print_sql()
else:
    migrate()
