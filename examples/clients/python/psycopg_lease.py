"""A lease with psycopg 3: held for a block, renewed by a thread, and the work is stopped when it is lost.

For work that is longer than a transaction and must not depend on one connection: a long import, a leader's duty, anything
behind a transaction pooler. A thread renews because a single step of the work may take longer than the TTL.

    with held_lease(conninfo, "import:orders", timedelta(seconds=30), on_lost=conn.cancel_safe) as lease:
        for batch in batches:
            with conn.transaction():
                lease.guard(conn)  # the check and the writes are one
                write(conn, batch)
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta


class LeaseLost(Exception):
    """The lease has ended or is somebody else's: stop, and write nothing more."""


@contextmanager
def held_lease(
    conninfo: str, name: str, ttl: timedelta, on_lost: Callable[[], object] = lambda: None
) -> Iterator[Lease]:
    """Wait for a lease and hold it for the block.

    `on_lost` is called by another thread as soon as the lease is known to be lost. The work's own `conn.cancel_safe` ends
    the statement that it is in, and with it the block: LeaseLost.
    """
    with connect(conninfo) as conn:
        [(token,)] = conn.execute("CALL lease_acquire_wait(%s, %s)", [name, ttl])
    lease = Lease(conninfo, name, token, ttl, on_lost)
    try:
        lease.keep()
        yield lease
    except psycopg.errors.QueryCanceled as error:
        if lease.lost:
            raise LeaseLost(name) from error
        raise
    finally:
        lease.release()


def connect(conninfo: str) -> psycopg.Connection:
    """A connection for one statement: none is kept that could break unnoticed. A pool's `connection()` does as well."""
    # No prepared statements: behind a transaction pooler the next one may run on another connection.
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None)


class Lease:
    """A lease that is kept. Its `token` goes along with each request to a system that no guard reaches."""

    def __init__(self, conninfo: str, name: str, token: int, ttl: timedelta, on_lost: Callable[[], object]) -> None:
        self.name = name
        self.token = token
        self._conninfo = conninfo
        self._ttl = ttl.total_seconds()
        self._on_lost = on_lost
        self._lost = threading.Event()
        self._over = threading.Event()
        self._alarm = threading.Timer(0, self._lose)
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True)

    @property
    def lost(self) -> bool:
        """Whether it is known to be lost. False is no promise: that is what the guard is for."""
        return self._lost.is_set()

    def check(self) -> None:
        """Raise LeaseLost if it is lost: for work between whose steps nothing is written that could be guarded."""
        if self.lost:
            raise LeaseLost(self.name)

    def guard(self, conn: psycopg.Connection) -> None:
        """In a transaction that writes: an error (55006, 55000) unless the lease is held, and then until its end."""
        conn.execute("SELECT lease_guard(%s, %s)", [self.name, self.token])

    def keep(self) -> None:
        """Renew it, and from now on at each third of the TTL: then one renewal may fail."""
        self._renew()  # the grant's answer may have been under way for a while; from here on we know what is left
        self._thread.start()

    def release(self) -> None:
        """End it."""
        self._over.set()
        if self._thread.ident:
            self._thread.join(self._ttl)  # a renewal that hangs for longer renews nothing
        self._alarm.cancel()
        with suppress(psycopg.OperationalError), connect(self._conninfo) as conn:  # if not by us, it ends by itself
            conn.execute("SELECT lease_release(%s, %s)", [self.name, self.token])

    def _keep_renewing(self) -> None:
        pause = self._ttl / 3
        while not self._over.wait(pause) and not self.lost:
            try:
                self._renew()
                pause = self._ttl / 3
            except (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState):  # 55006, 55000
                self._lose()
            except psycopg.Error:
                pause = self._ttl / 30  # try again until the alarm goes off

    def _renew(self) -> None:
        sent = time.monotonic()  # the server counts from a little later on
        with connect(self._conninfo) as conn:
            conn.execute("SELECT lease_renew(%s, %s)", [self.name, self.token])
        self._alarm.cancel()
        # By a timer, since the next renewal may hang.
        self._alarm = threading.Timer(sent + self._ttl - time.monotonic(), self._lose)
        self._alarm.daemon = True
        self._alarm.start()

    def _lose(self) -> None:
        if not self._lost.is_set() and not self._over.is_set():
            self._lost.set()
            self._on_lost()
