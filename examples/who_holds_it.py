"""Timeout: it says who holds the lock.

The strict forms raise where the others return false, so that the answer cannot be overlooked, and the error's DETAIL
names the holder.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import psycopg

from server import Server
from stage import Checks, crew_of, show_locks


class Busy(Exception):
    """Somebody else has the lock; the text says who."""


def lock_or_say_who(conn: psycopg.Connection, name: str, timeout: str) -> None:
    """Take a session lock, or raise an error that a person can act upon."""
    try:
        conn.execute("SELECT named_lock_strict(%s, timeout => %s)", [name, timeout])
    except psycopg.errors.LockNotAvailable as error:  # SQLSTATE 55P03
        raise Busy(f"{error.diag.message_primary}\n{error.diag.message_detail or ''}") from error


# The demonstration -------------------------------------------------------------------------------------------------

LOCK = "import:customers"


class Refusal(NamedTuple):
    """How a client was refused."""

    text: str
    seconds: float
    still_works: bool


def hold(conn: psycopg.Connection) -> int:
    """Take the lock and keep it; the server process that has it."""
    lock_or_say_who(conn, LOCK, "0")
    return conn.info.backend_pid


def ask(conn: psycopg.Connection) -> Refusal:
    """Ask for a lock that another session holds, and look whether anything is held afterwards."""
    begin = time.monotonic()
    try:
        lock_or_say_who(conn, LOCK, "500 ms")
    except Busy as busy:
        seconds = time.monotonic() - begin
        [(held,)] = conn.execute("SELECT named_lock_held(%s)", [LOCK])
        return Refusal(str(busy), seconds, held == 0)
    raise RuntimeError("got a lock that another session holds")


def demo(server: Server) -> Checks:
    """An import holds the lock; someone else asks for it and gives up."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as importer, crew_of(server) as support:
        importer.add("nightly-import", hold)
        importer.go()
        holder = importer.answer("nightly-import")
        checks.that(holder.error is None, "an import has the lock", holder.error)
        support.add("support-tool", ask)
        support.go()
        checks.until(
            "someone else waits for it",
            lambda: conn.execute("SELECT 1 FROM lock_waiters").fetchone() is not None,
        )
        show_locks(conn)
        answer = support.answer("support-tool")
        if checks.that(answer.error is None, "the wait ends in error 55P03", answer.error):
            refusal: Refusal = answer.value
            for line in refusal.text.splitlines():
                print(f"     {line}")
            detail = refusal.text.partition("\n")[2]
            checks.that(str(holder.value) in detail, f"its DETAIL names the holder's pid, {holder.value}", detail)
            checks.that("nightly-import" in detail, "and its application_name, nightly-import", detail)
            checks.that(0.5 <= refusal.seconds < 1.5, f"it came after 0.5 s: {refusal.seconds:.3f} s")
            checks.that(refusal.still_works, "the session goes on and holds nothing")
    return checks
