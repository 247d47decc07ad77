"""Paused holder: a worker is stopped, another takes over; the first one's late write is refused.

A program can stand still at any place: a virtual machine that moves, a full swap, SIGSTOP. It cannot know that its lease
has run out meanwhile. The database does: `lease_guard` in the transaction of the write makes the check and the write one.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show, show_locks

if TYPE_CHECKING:
    from collections.abc import Iterator

LEASE = "interest:2026"
TTL = timedelta(seconds=1.5)


@contextmanager
def held_lease(conninfo: str, name: str, ttl: timedelta) -> Iterator[int]:
    """Wait for a lease and hold it for the block, which gets its token.

    A thread with a connection of its own renews it at a third of the TTL, however long a step of the work takes.
    """
    with psycopg.connect(conninfo, autocommit=True) as conn:
        [(token,)] = conn.execute("CALL lease_acquire_wait(%s, %s)", [name, ttl])
        over = threading.Event()
        renewing = threading.Thread(target=keep_renewing, args=(conn, name, token, ttl, over), daemon=True)
        renewing.start()
        try:
            yield token
        finally:
            over.set()
            renewing.join()
            conn.execute("SELECT lease_release(%s, %s)", [name, token])  # false if it is lost already


def keep_renewing(conn: psycopg.Connection, name: str, token: int, ttl: timedelta, over: threading.Event) -> None:
    """Renew until it is over. A lease that is lost needs no alarm here: the guard will refuse."""
    while not over.wait(ttl.total_seconds() / 3):
        try:
            conn.execute("SELECT lease_renew(%s, %s)", [name, token])
        except psycopg.OperationalError:
            return


def pay_interest(conn: psycopg.Connection, token: int) -> None:
    """Read, compute, write. Between the first and the last, any time may pass."""
    [(balance,)] = conn.execute("SELECT balance FROM account")
    interest = balance * 3 / 100
    with conn.transaction():
        conn.execute("SELECT lease_guard(%s, %s)", [LEASE, token])
        conn.execute(
            """UPDATE account
                  SET balance = %s, payments = payments + 1, paid_by = current_setting('application_name')""",
            [balance + interest],
        )


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE account (balance numeric NOT NULL, payments integer NOT NULL DEFAULT 0, paid_by text);
    INSERT INTO account VALUES (1000);
"""


class Outcome(NamedTuple):
    """How a worker fared: the SQLSTATE and the text with which it was refused, if it was."""

    token: int
    sqlstate: str | None = None
    text: str = ""


def worker(conn: psycopg.Connection) -> Outcome:
    """Pay the interest under the lease."""
    with held_lease(conn.info.dsn, LEASE, TTL) as token:
        try:
            pay_interest(conn, token)
        except (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState) as error:  # 55006, 55000
            return Outcome(token, error.sqlstate, f"{error.diag.message_primary}\n{error.diag.message_detail or ''}")
    return Outcome(token)


def is_held_up(conn: psycopg.Connection, client: str) -> bool:
    """Whether a client waits for the table that the stage has locked."""
    waiting = conn.execute(
        """SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
            WHERE relation = 'account'::regclass AND NOT granted AND application_name = %s""",
        [client],
    ).fetchone()
    return waiting is not None


def holder(conn: psycopg.Connection) -> str | None:
    """Who holds the lease."""
    row = conn.execute("SELECT owner FROM lease_holder(%s)", [LEASE]).fetchone()
    return row[0] if row else None


def demo(server: Server) -> Checks:
    """The first worker is stopped after its SELECT and goes on while the second is at its UPDATE."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as first, crew_of(server) as second:
        conn.execute(TABLES)
        first.add("worker-1", worker)
        second.add("worker-2", worker)
        with held_up(server, "account", "ACCESS EXCLUSIVE"):
            first.go()
            checks.until("worker-1 has the lease and reads", lambda: is_held_up(conn, "worker-1"))
            second.go()
            checks.until("worker-2 waits for the lease", lambda: count(conn, "lock_waiters") == 1)
            show_locks(conn)
            first.pause("worker-1")
        with held_up(server, "account", "SHARE"):
            checks.until(
                "worker-1 was stopped: its lease ran out, worker-2 has it and is about to write",
                lambda: holder(conn) == "worker-2" and is_held_up(conn, "worker-2"),
            )
            first.resume("worker-1")
            late = first.answer("worker-1")
            if checks.that(late.error is None, "worker-1 goes on, with what it has read long ago", late.error):
                for line in late.value.text.splitlines():
                    print(f"     {line}")
                checks.that(late.value.sqlstate == "55006", "its write was refused with 55006", late.value)
                checks.that("worker-2" in late.value.text, "the error names worker-2", late.value)
        answer = second.answer("worker-2")
        if checks.no_errors([answer]):
            checks.that(answer.value.sqlstate is None, "worker-2 has written", answer.value)
            checks.that(answer.value.token > late.value.token, "its token is the higher one")
        show(conn, "account", "SELECT balance, payments, paid_by FROM account")
        [(paid,)] = conn.execute("SELECT balance = 1030 AND payments = 1 AND paid_by = 'worker-2' FROM account")
        checks.that(paid, "the interest was paid once")
        checks.that(count(conn, "lock_holders") == 0, "the lease was released")
    return checks
