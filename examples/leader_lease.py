"""Leader with an address: three nodes elect one, the others know where it is; it hands over when asked, or dies.

The lease carries the leader's address for everyone to read, and a token for everything that the leader does. It is
no matter of connections: a leader that loses its own has the rest of the TTL to come back.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import psycopg
from psycopg.types.json import Jsonb

from server import Server
from stage import Checks, count, crew_of, show, show_locks

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE = "leader:cluster"
TTL = timedelta(seconds=2)


def lead(conn: psycopg.Connection, address: str, duty: Callable[[int], object]) -> str:
    """Wait to become the leader, then do one round of duty after the other until asked to hand over; the reason.

    A round gets the token, for its guard. If the lease is lost, the guard or the renewal raises: the term is over.
    """
    [(token,)] = conn.execute(
        "CALL lease_acquire_wait(%s, %s, payload => %s)", [LEASE, TTL, Jsonb({"address": address})]
    )
    try:
        while True:
            next_renewal = time.monotonic() + TTL.total_seconds() / 3
            while time.monotonic() < next_renewal:
                duty(token)
            [(reason,)] = conn.execute("SELECT release_requested FROM lease_renew(%s, %s)", [LEASE, token])
            if reason is not None:
                return str(reason)
    finally:
        conn.execute("SELECT lease_release(%s, %s)", [LEASE, token])  # false if it is lost


def leader_address(conn: psycopg.Connection) -> str | None:
    """Where the leader is; None while there is none."""
    row = conn.execute("SELECT payload ->> 'address' FROM lease_holder(%s)", [LEASE]).fetchone()
    return row[0] if row else None


def ask_to_hand_over(conn: psycopg.Connection, reason: str) -> bool:
    """The leader hears of it at its next renewal; False if there is none."""
    [(asked,)] = conn.execute("SELECT lease_request(%s, %s)", [LEASE, reason])
    return bool(asked)


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE term (
        token bigint PRIMARY KEY,
        leader text NOT NULL DEFAULT current_setting('application_name'),
        since timestamptz NOT NULL DEFAULT clock_timestamp(),
        last_seen timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""


def node(conn: psycopg.Connection, address: str) -> str:
    """Lead, when its turn has come."""

    def duty(token: int) -> None:
        with conn.transaction():
            conn.execute("SELECT lease_guard(%s, %s)", [LEASE, token])
            conn.execute(
                "INSERT INTO term VALUES (%s) ON CONFLICT (token) DO UPDATE SET last_seen = clock_timestamp()", [token]
            )
        time.sleep(0.02)  # the pace of its rounds

    return lead(conn, address, duty)


def leaders(conn: psycopg.Connection) -> list[str]:
    """All leaders so far, in the order of their tokens."""
    return [row[0] for row in conn.execute("SELECT leader FROM term ORDER BY token")]


def terms_overlap(conn: psycopg.Connection) -> bool:
    """Whether anyone did a round after a leader with a higher token had begun."""
    [(overlaps,)] = conn.execute(
        """SELECT count(*) FROM (SELECT last_seen > lead(since) OVER (ORDER BY token) AS late FROM term) AS terms
            WHERE late"""
    )
    return bool(overlaps)


def demo(server: Server) -> Checks:
    """The first leader is asked to hand over, the second is killed, the third leads."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        conn.execute(TABLES)
        addresses = {f"node-{number}": f"10.0.0.{number}:8080" for number in range(1, 4)}
        for client, address in addresses.items():
            crew.add(client, node, address)
        crew.go()
        checks.until(
            "one leads, two wait in line",
            lambda: len(leaders(conn)) == 1 and count(conn, "lock_waiters") == 2,
        )
        show_locks(conn)
        line = [row[0] for row in conn.execute("SELECT application_name FROM lock_waiters ORDER BY queue_position")]
        order = leaders(conn) + line
        found = leader_address(conn)
        checks.that(found == addresses[order[0]], f"everyone sees where the leader is: {found}", order)
        checks.that(ask_to_hand_over(conn, "upgrade"), f"{order[0]} is asked to hand over")
        checks.until(f"it does: {order[1]}, first in line, leads", lambda: leaders(conn) == order[:2])
        answer = crew.answer(order[0])
        checks.that(answer.value == "upgrade", f"{order[0]} was told why: {answer.value}", answer.error)
        [(left,)] = conn.execute("SELECT remaining FROM lease_holder(%s)", [LEASE])
        crew.kill(order[1])
        killed = time.monotonic()
        checks.until(f"{order[1]} was killed: {order[2]} leads", lambda: leaders(conn) == order)
        seconds = time.monotonic() - killed
        checks.that(
            seconds < TTL.total_seconds() + 1, f"after {seconds:.3f} s: the lease had {left.total_seconds():.3f} s left"
        )
        found = leader_address(conn)
        checks.that(found == addresses[order[2]], f"everyone sees the new one: {found}", order)
        show(conn, "term", "SELECT token, leader, since::time, last_seen::time FROM term ORDER BY token")
        checks.that(not terms_overlap(conn), "never two leaders at once")
    return checks
