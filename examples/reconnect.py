"""Reconnect: a worker loses its connection and goes on with its lease from a new one.

A lease belongs to whoever has its token, not to a session. While the worker is away nobody else gets it; should it have
run out nevertheless, the guard in each batch's transaction keeps the worker from writing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show_locks

JOB = "import:orders"
TTL = timedelta(seconds=3)


class Import(NamedTuple):
    """A job done: under which token, and over how many connections."""

    token: int
    connections: int


def run_import(conninfo: str) -> Import | None:
    """Do the job's batches one by one, over as many connections as it takes; None if somebody else is at it.

    Renewed at a third of the TTL, the lease outlives a renewal that fails. A batch may take up to the other two thirds.
    """
    conn = psycopg.connect(conninfo, autocommit=True)
    connections = 1
    sent = time.monotonic()  # the server counts from a little later on
    [(acquired, token)] = conn.execute("SELECT acquired, token FROM lease_acquire(%s, %s)", [JOB, TTL])
    lease_ends = sent + TTL.total_seconds()
    next_renewal = sent + TTL.total_seconds() / 3
    while acquired:
        try:
            if time.monotonic() >= next_renewal:
                sent = time.monotonic()
                conn.execute("SELECT lease_renew(%s, %s)", [JOB, token])
                lease_ends = sent + TTL.total_seconds()
                next_renewal = sent + TTL.total_seconds() / 3
            if not do_batch(conn, token):
                conn.execute("SELECT lease_release(%s, %s)", [JOB, token])
                break
        except psycopg.OperationalError:
            if not conn.broken:
                raise  # 55006 and 55000 among them: the lease is lost, the work is over
            conn = connect_again(conninfo, lease_ends)
            connections += 1
            next_renewal = 0.0  # at once: that tells whether the lease is still ours
    conn.close()
    return Import(token, connections) if acquired else None


def connect_again(conninfo: str, deadline: float) -> psycopg.Connection:
    """Try until the lease has run out: then there is nothing to go on with."""
    while True:
        try:
            return psycopg.connect(conninfo, autocommit=True)
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def do_batch(conn: psycopg.Connection, token: int) -> bool:
    """One batch in one transaction; False if there is none left.

    Whether a batch is done stands in its row. So it does not matter whether a connection is lost before or after
    its COMMIT.
    """
    time.sleep(0.02)  # the work itself
    with conn.transaction():
        conn.execute("SELECT lease_guard(%s, %s)", [JOB, token])
        batch = conn.execute(
            """UPDATE batch SET done = done + 1, token = %s
                WHERE id = (SELECT min(id) FROM batch WHERE done = 0)""",
            [token],
        )
        return batch.rowcount > 0


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE batch (id integer PRIMARY KEY, done integer NOT NULL DEFAULT 0, token bigint);
    INSERT INTO batch (id) SELECT generate_series(1, 100);
"""

# The sessions of the worker that are in the middle of a batch.
HELD_UP = "SELECT pid FROM pg_stat_activity WHERE application_name = 'worker-1' AND wait_event_type = 'Lock'"


def worker(conn: psycopg.Connection) -> Import | None:
    """A worker with connections of its own."""
    return run_import(conn.info.dsn)


def has_renewed(conn: psycopg.Connection) -> bool:
    """Whether there is a lease that has been prolonged since its grant."""
    renewed = conn.execute("SELECT 1 FROM lock_holders WHERE expires_at - acquired_at > %s", [TTL]).fetchone()
    return renewed is not None


def demo(server: Server) -> Checks:
    """The worker's session is terminated in the middle of a batch; a second worker tries to get in."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew, crew_of(server) as rivals:
        conn.execute(TABLES)
        crew.add("worker-1", worker)
        rivals.add("worker-2", worker)
        crew.go()
        checks.until("a worker has the lease, and has renewed it", lambda: has_renewed(conn))
        with held_up(server, "batch", "SHARE"):
            checks.until("it is in the middle of a batch", lambda: len(conn.execute(HELD_UP).fetchall()) == 1)
            [(lost,)] = conn.execute(HELD_UP)
            conn.execute("SELECT pg_terminate_backend(%s)", [lost])
            checks.until(
                "its session was terminated: it goes on in a new one",
                lambda: [pid for (pid,) in conn.execute(HELD_UP) if pid != lost] != [],
            )
            [(token,)] = conn.execute("SELECT token FROM lock_holders")
            rivals.go()
            rival = rivals.answer("worker-2")
            checks.that(rival.error is None and rival.value is None, "a second worker did not get in", rival)
            show_locks(conn)
        answer = crew.answer("worker-1")
        if checks.no_errors([answer]):
            checks.that(answer.value == Import(token, 2), "one token was good for two connections", answer.value)
        rest = conn.execute("SELECT * FROM batch WHERE done <> 1 OR token <> %s", [token]).fetchall()
        checks.that(not rest, "each batch was done once, under that token", rest)
        checks.that(count(conn, "lock_holders") == 0, "the lease was released")
    return checks
