"""What the extension's views show."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg


def held(conn: psycopg.Connection) -> list[tuple[str, str]]:
    """The kind and name of all that is held."""
    return conn.execute("SELECT kind, name FROM lock_holders ORDER BY 1, 2").fetchall()


def waiting(conn: psycopg.Connection) -> int:
    """How many wait."""
    [(waiters,)] = conn.execute("SELECT count(*) FROM lock_waiters")
    return int(waiters)


def lease_owner(conn: psycopg.Connection, name: str) -> str | None:
    """Who has the lease."""
    row = conn.execute("SELECT owner FROM lease_holder(%s)", [name]).fetchone()
    return row[0] if row else None
