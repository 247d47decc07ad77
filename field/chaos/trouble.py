"""The troublemaker: does to the clients, the server and the pooler what happens to them in the field.

Notes what it does, `at` the time before and `until` the time after:

    terminate         pid: pg_terminate_backend
    cancel            pid: pg_cancel_backend
    stop backend      pid, seconds: SIGSTOP, and SIGCONT after that time
    stop client       client, seconds: the same
    kill client       client: SIGKILL
    kill backend      pid: SIGKILL, after which the server ends all sessions and recovers
    restart server    an immediate shutdown and a start
    restart pooler    mode
    break lease       name: lease_break
    look              the views are read
    seen twice        text: one of them showed what cannot be
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from chaos.asks import COUNTING_LEASE, LEASES, TTL
from chaos.history import History, now
from polling import until
from server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chaos.clients import Clients
    from pooler import Pooler

# How often in a minute.
PER_MINUTE = {
    "terminate": 20,
    "cancel": 60,
    "stop backend": 12,
    "stop client": 6,
    "kill client": 6,
    "kill backend": 2,
    "restart server": 1,
    "restart pooler": 2,
    "break lease": 3,
    "look": 10,
}

BACKENDS = """
    SELECT pid, wait_event_type IN ('Lock', 'Extension') FROM pg_stat_activity
     WHERE backend_type = 'client backend' AND usename = 'demo' AND application_name ~ %s ORDER BY application_name, pid
"""

# What one look at the views must never show. Those who hold a path of a tree hold the names above it in an intent mode.
SEEN_TWICE = """
    SELECT name, array_agg(kind), array_agg(pid), array_agg(token) FROM lock_holders
     WHERE kind IN ('session', 'transaction') AND mode = 'exclusive'
        OR kind = 'lease' AND state = 'held' AND name <> %s
     GROUP BY kind = 'lease', name HAVING count(DISTINCT CASE kind WHEN 'lease' THEN token ELSE pid END) > 1
"""


class ChaosServer(Server):
    """A server that is treated badly."""

    def signal_backend(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process of this server; false if it has gone. Whatever else has got its pid gets none."""
        assert self._process is not None
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if _parent(pid) != self._process.pid:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


class Troublemaker:
    """Works through a schedule that the seed alone decides; whom it meets is up to the moment."""

    def __init__(
        self, folder: Path, server: ChaosServer, poolers: dict[str, Pooler], clients: Clients, seed: str
    ) -> None:
        self.server = server
        self.poolers = poolers
        self.clients = clients
        self.history = History(folder, "trouble")
        self.random = random.Random(f"{seed}/trouble")
        self._timers: list[threading.Timer] = []
        self._conn: psycopg.Connection | None = None

    def schedule(self, seconds: float) -> list[tuple[float, str]]:
        """When to do what: each kind as often as it is to be, in any order."""
        deck = [what for what, times in PER_MINUTE.items() for _ in range(max(1, round(times * seconds / 60)))]
        self.random.shuffle(deck)
        return list(zip(sorted(self.random.uniform(0, seconds) for _ in deck), deck))

    def run(self, seconds: float) -> None:
        """Make trouble for so long."""
        begin = time.monotonic()
        for when, what in self.schedule(seconds):
            time.sleep(max(0.0, begin + when - time.monotonic()))
            with suppress(psycopg.OperationalError):  # the server is about to crash
                getattr(self, what.replace(" ", "_"))()
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        for timer in self._timers:
            timer.join()

    def close(self) -> None:
        """Let all that are stopped go on."""
        for timer in self._timers:
            timer.join()
        if self._conn is not None:
            self._conn.close()

    # What can be done ------------------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """End a session."""
        if (pid := self.backend()) is not None:
            self.do("SELECT pg_terminate_backend(%s)", [pid], "terminate", pid=pid)

    def cancel(self) -> None:
        """Cancel a statement.

        Not in the pooler's session mode: there it may meet DISCARD ALL on its way from one client to the next, and what is
        left of the first one's session is then the pooler's to answer for.
        """
        if (pid := self.backend(waiting=True, application="^(direct|transaction) ")) is not None:
            self.do("SELECT pg_cancel_backend(%s)", [pid], "cancel", pid=pid)

    def stop_backend(self) -> None:
        """Let a server process stand still, for longer than a lease's TTL or for less."""
        if (pid := self.backend()) is None:
            return
        seconds = self.random.uniform(0.2, 2.5 * TTL)
        at = now()
        if self.server.signal_backend(pid, signal.SIGSTOP):
            self.history.note("stop backend", at, until=now(), pid=pid, seconds=seconds)
            self.later(seconds, lambda: self.server.signal_backend(pid, signal.SIGCONT))

    def stop_client(self) -> None:
        """Let a client stand still, for longer than a lease's TTL."""
        number = self.random.randrange(len(self.clients))
        who, seconds, at = self.clients.name(number), self.random.uniform(1.1 * TTL, 2 * TTL), now()
        self.clients.signal(number, signal.SIGSTOP)
        self.history.note("stop client", at, until=now(), client=who, seconds=seconds)
        self.later(seconds, lambda: self.clients.signal(number, signal.SIGCONT))

    def kill_client(self) -> None:
        """Kill a client; another takes its place."""
        number = self.random.randrange(len(self.clients))
        who, at = self.clients.name(number), now()
        self.clients.kill(number)
        self.history.note("kill client", at, until=now(), client=who)

    def kill_backend(self) -> None:
        """Kill a server process: the server ends all sessions, for its shared memory may be damaged, and recovers."""
        if (pid := self.backend()) is None:
            return
        with self.server.superuser() as witness:
            at = now()
            if not self.server.signal_backend(pid, signal.SIGKILL):
                return
            until("the server has noticed", lambda: _is_lost(witness))
        until("the server is back", self.is_up)
        self.history.note("kill backend", at, until=now(), pid=pid)

    def restart_server(self) -> None:
        """Stop it as a power failure would, and start it again."""
        at = now()
        self.server.end(signal.SIGQUIT)
        until("the server is up again", self.server.start_again)
        self.history.note("restart server", at, until=now())

    def restart_pooler(self) -> None:
        """Kill one of the poolers, and start it again."""
        mode = self.random.choice(sorted(self.poolers))
        at = now()
        self.poolers[mode].stop()
        self.poolers[mode].start()
        self.history.note("restart pooler", at, until=now(), mode=mode)

    def break_lease(self) -> None:
        """End a lease that somebody may have."""
        name = self.random.choice([*LEASES, COUNTING_LEASE])
        self.do("SELECT lease_break(%s)", [name], "break lease", name=name)

    def look(self) -> None:
        """Read the views."""
        conn = self.connection()
        at = now()
        for row in conn.execute(SEEN_TWICE, [COUNTING_LEASE]):
            self.history.note("seen twice", text=str(row))
        conn.execute("SELECT count(*) FROM lock_waiters")
        conn.execute("SELECT lock_graph()")
        self.history.note("look", at, until=now())

    # How -------------------------------------------------------------------------------------------------------------

    def connection(self) -> psycopg.Connection:
        """A session that was alive a moment ago."""
        if self._conn is None or self._conn.closed or _is_lost(self._conn):
            self._conn = self.server.superuser()
        return self._conn

    def do(self, statement: str, parameters: list[object], what: str, **facts: object) -> None:
        """Run a statement and note it, even if there is no answer: it may have had its effect."""
        conn = self.connection()
        at = now()
        try:
            conn.execute(statement, parameters)
        finally:
            self.history.note(what, at, until=now(), **facts)

    def backend(self, waiting: bool = False, application: str = "") -> int | None:
        """The pid of a client's session, if there is one."""
        rows = self.connection().execute(BACKENDS, [application]).fetchall()
        rows = [row for row in rows if row[1]] or rows if waiting else rows
        return self.random.choice(rows)[0] if rows else None

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something after some time, whatever becomes of the server."""
        timer = threading.Timer(seconds, do)
        timer.start()
        self._timers.append(timer)

    def is_up(self) -> bool:
        """Whether the server lets one in."""
        try:
            self.server.superuser().close()
        except psycopg.OperationalError:
            return False
        return True


def _is_lost(conn: psycopg.Connection) -> bool:
    try:
        conn.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


def _parent(pid: int) -> int | None:
    """The parent of a process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
