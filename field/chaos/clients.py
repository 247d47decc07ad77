"""Clients: each takes something, reads counters, writes them one higher, gives it back, and again.

Between the reading and the writing any time may pass. So if two ever have the same thing at once, an update is lost, and
the ledger, which gets a line in the transaction of each write, shows which.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from chaos.history import History, now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

LOCKS = ["a", "b", "c", "d", "e", "f"]
SHARED = ["a", "b"]  # the others are never held in share mode: readers would keep writers out for long
LEAVES = ["site/1/x", "site/1/y", "site/2/x", "site/2/y"]
ROOT = "site"
TREES = [*LEAVES, *LEAVES, "site/1", "site/2", ROOT]
SEMAPHORES = {"a": 2, "b": 3}
LEASES = ["a", "b", "c", "d", "e"]
COUNTING_LEASE, PERMITS = "many", 2

TTL = 1.0  # seconds
HOLD_LIMIT = 0.6

TABLES = """
    CREATE TABLE counter (resource text PRIMARY KEY, value integer NOT NULL);
    CREATE TABLE ledger (write text NOT NULL, resource text NOT NULL, value integer NOT NULL, token bigint);
    CREATE FUNCTION put_down(write text, resources text[], new_values integer[], token bigint) RETURNS void
        BEGIN ATOMIC
            UPDATE counter SET value = new.value
              FROM unnest(resources, new_values) AS new (resource, value) WHERE counter.resource = new.resource;
            INSERT INTO ledger SELECT write, new.resource, new.value, token
              FROM unnest(resources, new_values) AS new (resource, value);
        END;
"""

# Without the sentinel, which says that a session with a bound lease is there (docs/inside.md).
OWN_LOCKS = """
    SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid >> 11 & 7 <> 1
"""

# Clients are forked from a process that has psycopg loaded and no connection open.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["__main__", "psycopg"])


def all_resources() -> list[str]:
    """All that has a counter."""
    slots = [f"semaphore:{name}#{slot + 1}" for name, permits in SEMAPHORES.items() for slot in range(permits)]
    return [f"lock:{name}" for name in LOCKS + LEAVES] + [f"lease:{name}" for name in LEASES] + slots


class Lost(Exception):
    """The connection has ended."""


class Over(Exception):
    """The run has ended."""


@dataclass(frozen=True)
class Route:
    """A way to the server."""

    name: str  # direct, session, transaction
    conninfo: str

    @property
    def keeps_session(self) -> bool:
        """Whether one server session is ours as long as the connection is."""
        return self.name != "transaction"


@dataclass(frozen=True)
class Ask:
    """What to ask for, how to give it back, and what the answer covers."""

    form: str
    names: list[str]
    take: str
    parameters: Sequence[Any]
    covers: Callable[[list[tuple[Any, ...]]], list[str]]
    give: str = ""
    mode: str = "exclusive"
    capacity: int = 1
    limit: float | None = None


@dataclass
class Session:
    """A connection that notes how it began and how it ended."""

    history: History
    route: Route
    name: str
    sent: int = field(default=0, init=False)  # when the last statement was sent

    def __post_init__(self) -> None:
        # A pooler's server sessions have other clients' prepared statements.
        self.conn = psycopg.connect(
            self.route.conninfo,
            application_name=f"{self.route.name} {self.history.who}",
            autocommit=True,
            connect_timeout=5,
            prepare_threshold=5 if self.route.name == "direct" else None,
        )
        [(pid,)] = self.conn.execute("SELECT pg_backend_pid()")
        self.pid = pid if self.route.keeps_session else None
        self.history.note("open", session=self.name, route=self.route.name, pid=self.pid)

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows. Raises Lost when the connection has ended, psycopg.Error when the statement alone has failed."""
        self.sent = now()
        try:
            cursor = self.conn.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            if not self.conn.closed and error.diag.severity_nonlocalized not in ("FATAL", "PANIC"):
                raise
            self.conn.close()
            self.history.note("lost", session=self.name, sqlstate=error.sqlstate, text=_one_line(error))
            raise Lost from error


class Client:
    """The life of a client process."""

    def __init__(self, folder: Path, who: str, route: Route, seed: str) -> None:
        self.history = History(folder, who)
        self.who = who
        self.route = route
        self.random = random.Random(f"{seed}/{who}")
        self.over = folder / "over"
        self.session: Session | None = None
        self.numbers = iter(range(1, 1_000_000_000))

    def work(self) -> None:
        """Take one thing after the other, from a new connection when the last one is lost."""
        by_transaction = [self.ask_lock, self.ask_lock, self.ask_all, self.ask_any, self.ask_tree]
        while not self.over.exists():
            with suppress(Lost, Over):
                turn = self.random.random()
                if turn < 0.35:
                    self.use_lease()
                elif turn < 0.6 or not self.route.keeps_session:
                    self.hold_for_transaction(self.random.choice(by_transaction)("xact_"))
                else:
                    self.hold_for_session(
                        self.random.choice([*by_transaction, self.ask_wait, self.ask_semaphore, self.ask_semaphore])("")
                    )
                self.think()

    def connected(self) -> Session:
        """A session that is not known to be lost."""
        while self.session is None or self.session.conn.closed:
            if self.over.exists():
                raise Over
            try:
                self.session = Session(self.history, self.route, f"{self.who}/s{next(self.numbers)}")
            except psycopg.OperationalError:
                time.sleep(0.05)  # the server or the pooler is down
        return self.session

    def think(self, seconds: float | None = None) -> None:
        """Let some time pass: mostly little."""
        if seconds is None:
            seconds = 0.2 if self.random.random() < 0.05 else 0.015
        time.sleep(self.random.uniform(0, seconds))

    def dawdle(self) -> None:
        """Once in a while, be late: the TTL is over, and nobody tells."""
        if self.random.random() < 0.02:
            time.sleep(1.2 * TTL)

    def timeout(self) -> str:
        """How long to wait."""
        return self.random.choice(["0", "300 ms", "300 ms", "2 s"])

    # What can be asked for -------------------------------------------------------------------------------------------

    def ask_lock(self, xact: str) -> Ask:
        """One name."""
        name = self.random.choice([*LOCKS, ROOT])
        covered = LEAVES if name == ROOT else [name]  # whoever locks a path needs its root too
        shared = name in SHARED and self.random.random() < 0.6
        limit = HOLD_LIMIT if not xact and self.random.random() < 0.2 else None
        hold_limit = f", hold_limit => '{limit} s'" if limit else ""
        mode = "share" if shared else "exclusive"
        return Ask(
            f"named_{xact}lock",
            [name],
            f"SELECT named_{xact}lock(%s, %s, %s{hold_limit}), pg_backend_pid()",
            [name, self.timeout(), mode],
            lambda rows: [f"lock:{name}" for name in covered] if rows[0][0] else [],
            give="SELECT named_unlock(%s)",
            mode=mode,
            limit=limit,
        )

    def ask_wait(self, _xact: str) -> Ask:
        """One name, without a snapshot while waiting."""
        name = self.random.choice(LOCKS)
        return Ask(
            "named_lock_wait",
            [name],
            "CALL named_lock_wait(%s, %s)",
            [name, self.timeout()],
            lambda rows: [f"lock:{name}"] if rows[0][0] else [],
            give="SELECT named_unlock(%s)",
        )

    def ask_all(self, xact: str) -> Ask:
        """Some names, all of them or none."""
        names = self.random.sample(LOCKS, self.random.randint(2, 3))
        return Ask(
            f"named_{xact}lock_all",
            names,
            f"SELECT named_{xact}lock_all(%s, %s), pg_backend_pid()",
            [names, self.timeout()],
            lambda rows: [f"lock:{name}" for name in names] if rows[0][0] else [],
            give="SELECT named_unlock_all()",
        )

    def ask_any(self, xact: str) -> Ask:
        """Up to two of some names."""
        names = self.random.sample(LOCKS, 4)
        return Ask(
            f"named_{xact}lock_any",
            names,
            f"SELECT name, pg_backend_pid() FROM named_{xact}lock_any(%s, 2) AS name",
            [names],
            lambda rows: [f"lock:{name}" for name, _ in rows],
            give="SELECT named_unlock_all()",
        )

    def ask_tree(self, xact: str) -> Ask:
        """A path and all below it."""
        path = self.random.choice(TREES)
        return Ask(
            f"named_{xact}lock_tree",
            [path],
            f"SELECT named_{xact}lock_tree(%s, %s), pg_backend_pid()",
            [path, self.timeout()],
            lambda rows: [f"lock:{leaf}" for leaf in LEAVES if f"{leaf}/".startswith(f"{path}/")] if rows[0][0] else [],
            give="SELECT named_unlock_tree(%s)",
        )

    def ask_semaphore(self, _xact: str) -> Ask:
        """A slot."""
        name, permits = self.random.choice(list(SEMAPHORES.items()))
        return Ask(
            "named_semaphore",
            [name],
            "SELECT named_semaphore(%s, %s, %s), pg_backend_pid()",
            [name, permits, self.timeout()],
            lambda rows: [f"semaphore:{name}#{rows[0][0]}"] if rows[0][0] else [],
            give="SELECT named_semaphore_release(%s, %s)",
            capacity=permits,
        )

    # Locks -----------------------------------------------------------------------------------------------------------

    def hold_for_session(self, ask: Ask) -> None:
        """Take, read, write, give back: a statement each."""
        session = self.connected()
        attempt = self.begin(session, ask)
        try:
            rows = session.run(ask.take, ask.parameters)
        except psycopg.Error as error:
            self.failed(attempt, error)
            self.look_back(session, attempt)
            return
        if not self.granted(session, attempt, ask, rows):
            self.look_back(session, attempt)
            return
        with suppress(psycopg.Error):
            self.count_held(session, attempt, ask)
            changes = self.changes(session, attempt, ask.mode, ask.covers(rows))
            if ask.limit and self.random.random() < 0.15:
                time.sleep(ask.limit + 0.2)  # the server ends this session
            if changes:
                write = self.note_write(attempt, changes)
                self.history.note("commit", write=write)
                self.finish_write(session, write, "SELECT put_down(%s, %s, %s, %s)", _row(write, changes))
        self.give_back(session, attempt, ask, rows)
        self.look_back(session, attempt)

    def give_back(self, session: Session, attempt: str, ask: Ask, rows: list[tuple[Any, ...]]) -> None:
        """Where that is cancelled nobody knows whether it was done before, so give back all that there may be."""
        parameters = {0: [], 1: ask.names, 2: [*ask.names, rows[0][0]]}[ask.give.count("%s")]
        self.history.note("release", attempt=attempt)
        try:
            session.run(ask.give, parameters)
        except psycopg.Error as error:
            self.history.note("released", attempt=attempt, sqlstate=error.sqlstate, text=_one_line(error))
            _in_any_case(session, "SELECT named_unlock_all()")
        else:
            self.history.note("released", attempt=attempt)

    def look_back(self, session: Session, attempt: str) -> None:
        """How many locks the session has, now that it should have none."""
        [(locks,)] = _in_any_case(session, OWN_LOCKS)
        self.history.note("idle", attempt=attempt, locks=locks)

    def hold_for_transaction(self, ask: Ask) -> None:
        """Take, read, write: in one transaction, with which the hold ends."""
        session = self.connected()
        _in_any_case(session, "BEGIN")
        attempt = self.begin(session, ask)
        granted, write = False, None
        try:
            rows = session.run(ask.take, ask.parameters)
            granted = self.granted(session, attempt, ask, rows)
            if granted:
                self.count_held(session, attempt, ask)
                changes = self.changes(session, attempt, ask.mode, ask.covers(rows))
                if changes:
                    write = self.note_write(attempt, changes)
                    session.run("SELECT put_down(%s, %s, %s, %s)", _row(write, changes))
        except psycopg.Error as error:
            if granted:  # until the error
                self.history.note("release", at=session.sent, attempt=attempt)
                self.history.note("released", attempt=attempt, sqlstate=error.sqlstate, text=_one_line(error))
            else:
                self.failed(attempt, error)
            if write:
                self.history.note("written", write=write, outcome="failed", sqlstate=error.sqlstate)
            _in_any_case(session, "ROLLBACK")
            return
        if not granted:
            _in_any_case(session, "ROLLBACK")
            return
        self.history.note("release", attempt=attempt)
        if write:
            self.history.note("commit", write=write)
            with suppress(psycopg.Error):
                self.finish_write(session, write, "COMMIT")
        else:
            _in_any_case(session, "COMMIT")
        self.history.note("released", attempt=attempt)

    def begin(self, session: Session, ask: Ask) -> str:
        """Note what is about to be asked for."""
        attempt = f"{self.who}/{next(self.numbers)}"
        self.history.note(
            "try",
            attempt=attempt,
            session=session.name,
            form=ask.form,
            names=ask.names,
            mode=ask.mode,
            capacity=ask.capacity,
            seconds=ask.limit,
        )
        return attempt

    def granted(self, session: Session, attempt: str, ask: Ask, rows: list[tuple[Any, ...]]) -> bool:
        """Note the answer."""
        resources = ask.covers(rows)
        if not resources:
            self.history.note("refuse", attempt=attempt)
            return False
        pid = rows[0][1] if len(rows[0]) > 1 else session.pid
        self.history.note("grant", attempt=attempt, resources=resources, pid=pid)
        return True

    def failed(self, attempt: str, error: psycopg.Error) -> None:
        """Note an error."""
        self.history.note("fail", attempt=attempt, sqlstate=error.sqlstate, text=_one_line(error))

    def count_held(self, session: Session, attempt: str, ask: Ask) -> None:
        """Of a set: how much of it the session has."""
        if ask.form.endswith(("_all", "_any")):
            [(count,)] = session.run(
                "SELECT count(*) FROM unnest(%s::text[]) AS name WHERE named_lock_held(name) > 0", [ask.names]
            )
            self.history.note("held", attempt=attempt, count=count)

    # Reading and writing ---------------------------------------------------------------------------------------------

    def changes(self, session: Session, attempt: str, mode: str, resources: list[str]) -> dict[str, int]:
        """Read, and think. In share mode read again; else what is to be written."""
        before = self.read(session, resources)
        self.think()
        if mode == "share":
            self.history.note("saw", attempt=attempt, values=[before, self.read(session, resources)])
            return {}
        return {resource: value + 1 for resource, value in before.items()}

    def read(self, session: Session, resources: list[str]) -> dict[str, int]:
        """The counters."""
        return dict(session.run("SELECT resource, value FROM counter WHERE resource = ANY (%s)", [resources]))

    def note_write(self, attempt: str, changes: dict[str, int], token: int | None = None) -> str:
        """Note what is about to be written."""
        write = f"{self.who}/w{next(self.numbers)}"
        self.history.note("write", write=write, attempt=attempt, changes=changes, token=token)
        return write

    def finish_write(self, session: Session, write: str, statement: str, parameters: Sequence[Any] = ()) -> None:
        """Run the statement with which the write is committed. Without its answer nobody knows whether it was."""
        try:
            session.run(statement, parameters)
        except (Lost, psycopg.Error) as error:
            self.history.note("written", write=write, outcome="unknown", sqlstate=getattr(error, "sqlstate", None))
            raise
        self.history.note("written", write=write, outcome="acked")

    # Leases ----------------------------------------------------------------------------------------------------------

    def use_lease(self) -> None:
        """Acquire, some rounds of reading, thinking, renewing and guarded writing, release."""
        counting = self.random.random() < 0.2
        name = COUNTING_LEASE if counting else self.random.choice(LEASES)
        session = self.connected()
        attempt, token = self.acquire(session, name, PERMITS if counting else 1)
        if token is None:
            return
        with suppress(psycopg.Error):
            for _ in range(self.random.randint(1, 4)):
                if self.random.random() < 0.4 and not self.renew(attempt, name, token):
                    return
                # Losing the connection does not lose the lease, unless it is bound to it.
                changes = {} if counting else self.changes_under_lease(attempt, name)
                self.dawdle()
                outcome = self.guarded_write(attempt, name, token, changes)
                if outcome == "refused":
                    return
                if outcome == "unknown":
                    # It may still be under way. Whoever gets the lease next waits for it; we would not.
                    break
        keep = 0.2 if not counting and self.random.random() < 0.1 else None
        self.history.note("release", attempt=attempt, keep=keep)
        with suppress(psycopg.Error):
            [(gave,)] = self.again(
                lambda session: session.run(
                    "SELECT lease_release(%s, %s, %s)", [name, token, f"{keep} s" if keep else None]
                )
            )
            self.history.note("released", attempt=attempt, gave=gave)

    def acquire(self, session: Session, name: str, permits: int) -> tuple[str, int | None]:
        """The attempt's name, and the token."""
        attempt = f"{self.who}/{next(self.numbers)}"
        form = self.random.choice(["lease_acquire", "lease_acquire", "lease_acquire_wait"])
        bound = self.route.keeps_session and self.random.random() < 0.2
        self.bound = bound
        self.history.note(
            "try",
            attempt=attempt,
            session=session.name,
            form=form,
            names=[name],
            capacity=permits,
            seconds=TTL,
            bound=bound,
        )
        arguments = "(%s, %s, %s, permits => %s, bound => %s)"
        call = (
            f"CALL lease_acquire_wait{arguments}"
            if form == "lease_acquire_wait"
            else (f"SELECT token FROM lease_acquire{arguments}")
        )
        try:
            [(token,)] = session.run(call, [name, f"{TTL} s", self.timeout(), permits, bound])
        except psycopg.Error as error:
            self.failed(attempt, error)
            return attempt, None
        if token is None:
            self.history.note("refuse", attempt=attempt)
        else:
            self.history.note("grant", attempt=attempt, resources=[f"lease:{name}"], token=token, pid=session.pid)
        return attempt, token

    def again(self, do: Callable[[Session], Any]) -> Any:
        """From a new connection if the one we have is lost; not for a bound lease, which is lost with it."""
        while True:
            try:
                return do(self.connected())
            except Lost:
                if self.bound:
                    raise

    def changes_under_lease(self, attempt: str, name: str) -> dict[str, int]:
        """What is to be written."""
        return self.again(lambda session: self.changes(session, attempt, "exclusive", [f"lease:{name}"]))

    def renew(self, attempt: str, name: str, token: int) -> bool:
        """Whether the lease is still ours; it is as long as nobody says that it is not."""
        self.history.note("renew", attempt=attempt)
        try:
            self.connected().run("SELECT lease_renew(%s, %s)", [name, token])
        except Lost:
            self.history.note("renewed", attempt=attempt, outcome="unknown")
            return not self.bound
        except psycopg.Error as error:
            refused = error.sqlstate in ("55000", "55006")
            outcome = "refused" if refused else "unknown"
            self.history.note("renewed", attempt=attempt, outcome=outcome, sqlstate=error.sqlstate)
            return not refused
        self.history.note("renewed", attempt=attempt, outcome="acked")
        return True

    def guarded_write(self, attempt: str, name: str, token: int, changes: dict[str, int]) -> str:
        """Write in one transaction with the guard; the outcome."""
        write = self.note_write(attempt, changes, token)
        session = self.connected()
        guarded = False
        try:
            session.run("BEGIN")
            session.run("SELECT lease_guard(%s, %s)", [name, token])
            guarded = True
            self.history.note("guarded", write=write)
            self.think()
            self.dawdle()
            session.run("SELECT put_down(%s, %s, %s, %s)", _row(write, changes, token))
        except Lost:
            self.history.note("written", write=write, outcome="failed")
            if self.bound:
                raise
            return "failed"
        except psycopg.Error as error:
            refused = not guarded and error.sqlstate in ("55000", "55006")
            outcome = "refused" if refused else "failed"
            self.history.note("written", write=write, outcome=outcome, sqlstate=error.sqlstate)
            with suppress(Lost):
                _in_any_case(session, "ROLLBACK")
            return outcome
        self.history.note("commit", write=write)
        try:
            self.finish_write(session, write, "COMMIT")
        except (Lost, psycopg.Error):
            return "unknown"
        return "acked"


def _in_any_case(session: Session, statement: str) -> list[tuple[Any, ...]]:
    """Run something that can only fail because it was cancelled, until it was not."""
    while True:
        try:
            return session.run(statement)
        except psycopg.errors.QueryCanceled:
            continue


def _row(write: str, changes: dict[str, int], token: int | None = None) -> list[Any]:
    return [write, list(changes), list(changes.values()), token]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _life(folder: Path, who: str, route: Route, seed: str) -> None:
    """What a client's process does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C: end without a word
    client = Client(folder, who, route, seed)
    try:
        client.work()
    except Exception:  # noqa: BLE001 (whatever it is, it is told)
        client.history.note("broke", text=traceback.format_exc())


class Clients:
    """The client processes. One that is killed is followed by another, of the same route and another name."""

    def __init__(self, folder: Path, routes: Sequence[Route], seed: str) -> None:
        self.folder = folder
        self.routes = routes
        self.seed = seed
        self._running: list[tuple[str, BaseProcess]] = [self._start(number, 1) for number in range(len(routes))]
        self._lives = [1] * len(routes)

    def _start(self, number: int, life: int) -> tuple[str, BaseProcess]:
        who = f"client-{number:02}.{life}"
        process = _processes.Process(target=_life, args=(self.folder, who, self.routes[number], self.seed), daemon=True)
        process.start()
        return who, process

    def __len__(self) -> int:
        return len(self._running)

    def name(self, number: int) -> str:
        """What it calls itself, in its history and to the server."""
        return self._running[number][0]

    def kill(self, number: int) -> None:
        """SIGKILL: it has no chance to say goodbye. Another takes its place."""
        process = self._running[number][1]
        process.kill()
        process.join()
        self._lives[number] += 1
        self._running[number] = self._start(number, self._lives[number])

    def signal(self, number: int, signal_number: signal.Signals) -> None:
        """Stop or continue it. A process that has not been waited for keeps its pid."""
        process = self._running[number][1]
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, signal_number)

    def end(self, seconds: float) -> list[str]:
        """Let all end what they are at; those that did not."""
        (self.folder / "over").touch()
        deadline = time.monotonic() + seconds
        for _, process in self._running:
            process.join(max(0.0, deadline - time.monotonic()))
        return [who for who, process in self._running if process.exitcode is None]

    def close(self) -> None:
        """End all by force."""
        for _, process in self._running:
            process.kill()
            process.join()
