"""Leader: four schedulers elect one; it is killed, the next in line takes over.

The lock belongs to the session. When the process dies the kernel closes its connection, the server ends the session,
and the lock goes to the next in the queue: no heartbeat table, no poll loop.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psycopg

from server import Server
from stage import Checks, count, crew_of, show, show_locks

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK = "leader:scheduler"


def lead(conn: psycopg.Connection, duty: Callable[[], bool], limit: str = "10 s") -> None:
    """Wait to become the leader, then do one round of duty after the other until it returns False.

    The wait can last for weeks, so it is one that holds no snapshot: VACUUM goes on beside it. A leader that hangs,
    or whose machine has vanished without closing its connection, is put out as well: `hold_limit` ends its session
    unless every round asks for a new limit.
    """
    conn.execute("CALL named_lock_wait(%s, hold_limit => %s)", [LOCK, limit])
    try:
        while duty():
            conn.execute("SELECT named_lock_extend(%s, %s)", [LOCK, limit])
    finally:
        conn.execute("SELECT named_unlock(%s)", [LOCK])


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE leadership (
        leader text PRIMARY KEY,
        since timestamptz NOT NULL DEFAULT clock_timestamp(),
        last_seen timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""

ROUND = """
    INSERT INTO leadership (leader) VALUES (current_setting('application_name'))
    ON CONFLICT (leader) DO UPDATE SET last_seen = clock_timestamp()
"""


def scheduler(conn: psycopg.Connection) -> str:
    """Lead, when its turn has come, until told to end by SIGTERM."""
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))

    def duty() -> bool:
        conn.execute(ROUND)
        time.sleep(0.02)  # the pace of its rounds
        return not told_to_end

    lead(conn, duty)
    return "resigned"


def leaders(conn: psycopg.Connection) -> list[str]:
    """All leaders so far, in the order of their terms."""
    return [row[0] for row in conn.execute("SELECT leader FROM leadership ORDER BY since")]


def terms_overlap(conn: psycopg.Connection) -> bool:
    """Whether anyone did a round after the next leader had begun."""
    [(overlaps,)] = conn.execute(
        """SELECT count(*) FROM (SELECT last_seen > lead(since) OVER (ORDER BY since) AS late FROM leadership) AS term
            WHERE late"""
    )
    return bool(overlaps)


def demo(server: Server) -> Checks:
    """The first leader is killed, the second resigns, the third leads."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        conn.execute(TABLES)
        for number in range(1, 5):
            crew.add(f"scheduler-{number}", scheduler)
        crew.go()
        checks.until(
            "one leads, three wait in line",
            lambda: len(leaders(conn)) == 1 and count(conn, "lock_waiters") == 3,
        )
        show_locks(conn)
        line = [row[0] for row in conn.execute("SELECT application_name FROM lock_waiters ORDER BY queue_position")]
        order = leaders(conn) + line
        crew.kill(order[0])
        checks.until(f"{order[0]} was killed: {order[1]}, first in line, leads", lambda: leaders(conn) == order[:2])
        crew.terminate(order[1])
        checks.until(f"{order[1]} resigned: {order[2]} leads", lambda: leaders(conn) == order[:3])
        checks.no_errors([crew.answer(order[1])])
        show(conn, "leadership", "SELECT leader, since::time, last_seen::time FROM leadership ORDER BY since")
        checks.that(not terms_overlap(conn), "never two leaders at once")
    return checks
