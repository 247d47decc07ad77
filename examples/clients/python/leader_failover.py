"""Leader election where the server itself may fail over: a leader that comes back to the new primary in time leads on.

For a primary with standbys (Patroni and the like): the connection string names all servers, and libpq finds the one that
takes writes. The leader counts the time that it may act by its own clock, from before it asked. Each write has the
token: `lease_guard` here, and a check for the highest one seen in systems elsewhere. With synchronous replication there
are never two leaders at once; with asynchronous replication there may be, for a TTL at most, of whom one can write.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable

LOST = (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState)  # 55006, 55000
AWAY = (
    psycopg.OperationalError,
    psycopg.errors.ReadOnlySqlTransaction,
)  # no server, or one that is no primary any more


@dataclass
class Term:
    """A time of leadership."""

    token: int
    until: float  # by time.monotonic(): the TTL after the last renewal that succeeded was sent


def connect(conninfo: str) -> psycopg.Connection:
    """To whichever server is the primary. One that does not answer is noticed within seconds."""
    return psycopg.connect(
        conninfo,
        autocommit=True,
        target_session_attrs="read-write",
        connect_timeout=2,
        tcp_user_timeout=3000,
        keepalives_idle=1,
        keepalives_interval=1,
        keepalives_count=2,
    )


def lead(conninfo: str, name: str, ttl: timedelta, duty: Callable[[psycopg.Connection, Term], object]) -> Term:
    """Wait to become the leader, then do one short round of duty after the other until that is lost; the term.

    A round that is broken off by a lost connection, here or in the duty itself, may have been committed or not.
    """
    conn, term = campaign(conninfo, name, ttl)
    next_renewal = term.until - ttl.total_seconds() * 2 / 3
    try:
        while (now := time.monotonic()) < term.until:
            try:
                if conn.closed:
                    conn = connect(conninfo)
                    next_renewal = now
                elif now >= next_renewal:
                    conn.execute("SELECT lease_renew(%s, %s)", [name, term.token])
                    term.until = now + ttl.total_seconds()
                    next_renewal = now + ttl.total_seconds() / 3
                else:
                    duty(conn, term)
            except LOST:
                break
            except AWAY:
                conn.close()
                time.sleep(0.1)
    finally:
        with suppress(psycopg.Error), conn:  # also closes it
            conn.execute("SELECT lease_release(%s, %s)", [name, term.token])  # false if it is lost
    return term


def campaign(conninfo: str, name: str, ttl: timedelta) -> tuple[psycopg.Connection, Term]:
    """Stand in line until elected, over as many failovers as there may be."""
    while True:
        try:
            conn = connect(conninfo)
            while True:
                asked = time.monotonic()
                # Time spent in line is not the lease's: a short wait, so that little of its TTL seems gone.
                [(token,)] = conn.execute("CALL lease_acquire_wait(%s, %s, timeout => %s)", [name, ttl, ttl / 3])
                if token is not None:
                    return conn, Term(token, asked + ttl.total_seconds())
        except AWAY:
            # If the grant was made and its answer lost, nobody leads until its TTL has passed.
            time.sleep(0.1)
