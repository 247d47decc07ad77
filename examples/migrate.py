"""Migration: three pods start at once, one migrates, with CREATE INDEX CONCURRENTLY.

CREATE INDEX CONCURRENTLY waits for every snapshot that is older than the index. A pod that waits inside an ordinary
statement, pg_advisory_lock() for one, holds such a snapshot, and the two wait for each other: "deadlock detected".
CALL named_lock_wait() holds none.
"""

from __future__ import annotations

from typing import NamedTuple

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show, show_locks

LOCK = "migrate:app"


class Migration(NamedTuple):
    """A step of the schema; its statements run one by one, because CONCURRENTLY refuses a transaction block."""

    version: int
    statements: list[str]


MIGRATIONS = [
    Migration(1, ["ALTER TABLE orders ADD COLUMN IF NOT EXISTS note text"]),
    Migration(
        2,
        [
            "DROP INDEX CONCURRENTLY IF EXISTS orders_by_customer",  # the invalid rest of a build that was broken off
            "CREATE INDEX CONCURRENTLY orders_by_customer ON orders (customer)",
        ],
    ),
]


def migrate(conn: psycopg.Connection, timeout: str = "5 min") -> list[int]:
    """Bring the schema up to date and return the versions applied: none if another pod has done it.

    `conn` has to be in autocommit mode: inside a transaction block there is no waiting without a snapshot.
    """
    [(acquired,)] = conn.execute("CALL named_lock_wait(%s, timeout => %s)", [LOCK, timeout])
    if not acquired:
        raise TimeoutError(f"another migration has been running for {timeout}")
    try:
        done = {row[0] for row in conn.execute("SELECT version FROM schema_version")}
        pending = [migration for migration in MIGRATIONS if migration.version not in done]
        for migration in pending:
            for statement in migration.statements:
                conn.execute(statement)
            conn.execute("INSERT INTO schema_version (version) VALUES (%s)", [migration.version])
        return [migration.version for migration in pending]
    finally:
        conn.execute("SELECT named_unlock(%s)", [LOCK])


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE schema_version (
        version integer PRIMARY KEY,
        applied_by text NOT NULL DEFAULT current_setting('application_name'),
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE TABLE orders (id bigint PRIMARY KEY, customer integer NOT NULL);
    INSERT INTO orders SELECT n, n % 5000 FROM generate_series(1, 200000) AS n;
"""


def snapshots_of_waiters(conn: psycopg.Connection) -> int:
    """How many of the waiting sessions hold a snapshot, which would stop the index."""
    [(held,)] = conn.execute(
        """SELECT count(*) FROM lock_waiters JOIN pg_stat_activity USING (pid)
            WHERE backend_xmin IS NOT NULL OR backend_xid IS NOT NULL"""
    )
    return int(held)


def index_is_valid(conn: psycopg.Connection) -> bool:
    """Whether the index is there and was built to its end."""
    valid = conn.execute(
        "SELECT 1 FROM pg_index WHERE indexrelid = to_regclass('orders_by_customer') AND indisvalid"
    ).fetchone()
    return valid is not None


def demo(server: Server) -> Checks:
    """The first pod is held up in its first step until both others wait; then it builds the index beside them."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        conn.execute(TABLES)
        with held_up(server, "orders", "ACCESS SHARE"):
            for number in range(1, 4):
                crew.add(f"pod-{number}", migrate)
            crew.go()
            checks.until(
                "one pod migrates, two wait",
                lambda: count(conn, "lock_holders") == 1 and count(conn, "lock_waiters") == 2,
            )
            show_locks(conn)
            checks.that(snapshots_of_waiters(conn) == 0, "the waiting pods hold no snapshot")
        answers = crew.answers()
        checks.no_errors(answers)
        applied = sorted(answer.value or [] for answer in answers)
        checks.that(applied == [[], [], [1, 2]], "one applied both steps, the others found it done", applied)
        show(conn, "schema_version", "SELECT version, applied_by, applied_at::time FROM schema_version ORDER BY 1")
        checks.that(index_is_valid(conn), "the index is valid")
        checks.that(count(conn, "lock_holders") == 0, "every lock was given back")
    return checks
