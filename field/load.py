"""Clients in threads, which take leases and named locks at whatever server they reach."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import psycopg

from leader_failover import LOST
from notes import Grant, Notes, Span, read
from polling import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from server import Server

LEASES = [f"job:{number}" for number in range(8)]
LOCK = "captain"

TABLES = """
    CREATE TABLE target (name text PRIMARY KEY, token bigint NOT NULL);
    CREATE TABLE accepted (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text, token bigint, writer text);
"""


def write(conn: psycopg.Connection, name: str, token: int, writer: str) -> bool:
    """Write into the tables above unless a higher token has been seen there; whether it was."""
    with conn.transaction():
        is_accepted = conn.execute(
            """INSERT INTO target VALUES (%s, %s)
                   ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE target.token <= excluded.token""",
            [name, token],
        ).rowcount
        if is_accepted:
            conn.execute("INSERT INTO accepted (name, token, writer) VALUES (%s, %s, %s)", [name, token, writer])
    return bool(is_accepted)


def accepted(conn: psycopg.Connection, name: str) -> list[tuple[int, str]]:
    """The tokens and writers of all accepted writes, in their order."""
    return conn.execute("SELECT token, writer FROM accepted WHERE name = %s ORDER BY id", [name]).fetchall()


class Load:
    """Client threads."""

    def __init__(self, folder: Path, store: Server) -> None:
        self.folder = folder
        self._store = store
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []

    def add(self, client: str, play: Callable[..., None], *arguments: Any) -> None:
        """Start a thread: `play` is one of the functions below."""
        thread = threading.Thread(target=self._run, args=(client, play, arguments), name=client, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Let all come to their end. Those that wait for a server for ever have to be freed by stopping that."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end"
        self.check()

    def check(self) -> None:
        """Raise what a client has failed with."""
        for error in self._errors:
            raise error

    def grants(self, server: int | None = None, since: float = 0) -> list[Grant]:
        """All grants of leases so far, or those of the server with this port, asked for since then."""
        self.check()
        grants = [
            Grant(answered=note.at, client=note.client, **note.details)
            for note in read(self.folder)
            if note.what == "granted"
        ]
        return [grant for grant in grants if server in (None, grant.server) and grant.asked >= since]

    def count(self, what: str, since: float = 0) -> int:
        """How often something was noted."""
        self.check()
        return sum(note.what == what and note.at >= since for note in read(self.folder))

    def held(self) -> list[Span]:
        """When clients took themselves for the holder of the named lock."""
        spans: list[Span] = []
        begun: dict[str, tuple[float, int]] = {}
        for note in read(self.folder):
            if note.what == "holds":
                begun[note.client] = note.at, note.details["server"]
            elif note.what in ("gives back", "told") and note.client in begun:
                start, server = begun.pop(note.client)
                spans.append(Span(start, note.at, note.client, server))
        # Those who hold it now.
        spans += [Span(start, time.monotonic(), client, server) for client, (start, server) in begun.items()]
        return sorted(spans)

    def _run(self, client: str, play: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            play(client, Notes(self.folder, client), self._store, self._over, *arguments)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
            self._errors.append(error)


def work(
    client: str, notes: Notes, store: Server, over: threading.Event, conninfo: str, standby: Server | None = None
) -> None:
    """Take a lease, write under it here and elsewhere, give it back; then the next.

    When the connection breaks, go on from a new one with the same token, if that is still good. With a standby, look
    there for each lease that was granted.
    """
    with store.connect(client) as elsewhere:
        lease: tuple[str, int] | None = None
        names = itertools.cycle(LEASES)
        while not over.is_set():
            try:
                with psycopg.connect(conninfo, autocommit=True, application_name=client) as conn:
                    while lease or not over.is_set():
                        if lease is None:
                            lease = _acquire(conn, next(names), notes)
                        else:
                            _use(conn, elsewhere, *lease, client, notes, standby)
                            lease = None
            except LOST as error:
                name, token = lease or ("", 0)
                notes.add("lost", name=name, token=token, sqlstate=error.sqlstate)
                lease = None
            except psycopg.OperationalError:
                time.sleep(0.05)


def _acquire(conn: psycopg.Connection, name: str, notes: Notes) -> tuple[str, int] | None:
    asked = time.monotonic()
    row = conn.execute("SELECT acquired, token FROM lease_acquire(%s, '2 min', '10 ms')", [name]).fetchone()
    if row is None or not row[0]:
        return None
    notes.add("granted", asked=asked, name=name, token=row[1], server=conn.info.port)
    return name, row[1]


def _use(
    conn: psycopg.Connection,
    elsewhere: psycopg.Connection,
    name: str,
    token: int,
    client: str,
    notes: Notes,
    standby: Server | None,
) -> None:
    if standby is not None and standby.port != conn.info.port:
        with standby.connect(client) as reader:
            if reader.execute("SELECT lease_check(%s, %s)", [name, token]).fetchone() != (True,):
                notes.add("not on the standby", name=name, token=token)
    for _ in range(2):
        with conn.transaction():
            conn.execute("SELECT lease_guard(%s, %s)", [name, token])
            if not write(conn, name, token, client):
                notes.add("stale write through the guard", name=name, token=token)
        if not write(elsewhere, name, token, client):
            notes.add("refused elsewhere", name=name, token=token, server=conn.info.port)
        conn.execute("SELECT lease_renew(%s, %s)", [name, token])
    notes.add("gives back", name=name, token=token)
    conn.execute("SELECT lease_release(%s, %s)", [name, token])


def stand_in_line(client: str, notes: Notes, _store: Server, over: threading.Event, conninfo: str) -> None:
    """Wait for the named lock and hold it to the end. When the connection breaks, stand in line anew."""
    while not over.is_set():
        try:
            conn = psycopg.connect(conninfo, autocommit=True, application_name=client)
        except psycopg.OperationalError:
            time.sleep(0.05)
            continue
        with conn:
            try:
                conn.execute("SELECT named_lock(%s)", [LOCK])
                notes.add("holds", server=conn.info.port)
                while not over.is_set():
                    for _ in conn.notifies(timeout=0.1):  # idle, and hears of the connection's end
                        pass
                notes.add("gives back")
                conn.execute("SELECT named_unlock(%s)", [LOCK])
            except psycopg.OperationalError as error:
                notes.add("told", server=conn.info.port, sqlstate=error.sqlstate)
