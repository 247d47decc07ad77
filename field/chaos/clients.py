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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from chaos.asks import BY_SESSION, BY_TRANSACTION, COUNTING_LEASE, LEASES, PERMITS, TTL, Ask, timeout
from chaos.history import History
from chaos.session import Lost, Route, Session, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

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


class Over(Exception):
    """The run has ended."""


@dataclass(frozen=True)
class Lease:
    """What we were granted."""

    attempt: str
    name: str
    token: int
    bound: bool


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
        while not self.over.exists():
            with suppress(Lost, Over):
                turn = self.random.random()
                if turn < 0.35:
                    self.use_lease()
                elif turn < 0.6 or not self.route.keeps_session:
                    self.hold_for_transaction(self.random.choice(BY_TRANSACTION)(self.random, "xact_"))
                else:
                    self.hold_for_session(self.random.choice(BY_SESSION)(self.random, ""))
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

    def think(self) -> None:
        """Let some time pass: mostly little."""
        time.sleep(self.random.uniform(0, 0.2 if self.random.random() < 0.05 else 0.015))

    def dawdle(self) -> None:
        """Once in a while, be late: the TTL is over, and nobody tells."""
        if self.random.random() < 0.02:
            time.sleep(1.2 * TTL)

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
            self.history.note("released", attempt=attempt, sqlstate=error.sqlstate, text=one_line(error))
            session.run_in_any_case("SELECT named_unlock_all()")
        else:
            self.history.note("released", attempt=attempt)

    def look_back(self, session: Session, attempt: str) -> None:
        """How many locks the session has, now that it should have none."""
        [(locks,)] = session.run_in_any_case(OWN_LOCKS)
        self.history.note("idle", attempt=attempt, locks=locks)

    def hold_for_transaction(self, ask: Ask) -> None:
        """Take, read, write: in one transaction, with which the hold ends."""
        session = self.connected()
        session.run_in_any_case("BEGIN")
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
                self.history.note("released", attempt=attempt)
            else:
                self.failed(attempt, error)
            if write:
                self.history.note("written", write=write, outcome="failed")
            session.run_in_any_case("ROLLBACK")
            return
        if not granted:
            session.run_in_any_case("ROLLBACK")
            return
        self.history.note("release", attempt=attempt)
        if write:
            self.history.note("commit", write=write)
            with suppress(psycopg.Error):
                self.finish_write(session, write, "COMMIT")
        else:
            session.run_in_any_case("COMMIT")
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
        self.history.note("fail", attempt=attempt, sqlstate=error.sqlstate, text=one_line(error))

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
        except (Lost, psycopg.Error):
            self.history.note("written", write=write, outcome="unknown")
            raise
        self.history.note("written", write=write, outcome="acked")

    # Leases ----------------------------------------------------------------------------------------------------------

    def use_lease(self) -> None:
        """Acquire, some rounds of renewing, reading, thinking and guarded writing, release."""
        lease = self.acquire()
        if lease is None:
            return
        for _ in range(self.random.randint(1, 4)):
            if self.random.random() < 0.4 and not self.renew(lease):
                return
            try:
                outcome = self.guarded_write(lease, self.changes_under(lease))
            except psycopg.errors.QueryCanceled:
                continue  # while it read
            if outcome == "refused":
                return
            if outcome == "unknown":
                break  # it may still be under way: whoever gets the lease next waits for it, we would not
        self.release(lease)

    def acquire(self) -> Lease | None:
        """One of the leases, if it can be had."""
        session = self.connected()
        attempt = f"{self.who}/{next(self.numbers)}"
        form = self.random.choice(["lease_acquire", "lease_acquire", "lease_acquire_wait"])
        name = self.random.choice([*LEASES, COUNTING_LEASE])
        permits = PERMITS if name == COUNTING_LEASE else 1
        bound = self.route.keeps_session and self.random.random() < 0.2
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
        call = "CALL lease_acquire_wait" if form == "lease_acquire_wait" else "SELECT token FROM lease_acquire"
        try:
            [(token,)] = session.run(
                f"{call}(%s, %s, %s, permits => %s, bound => %s)",
                [name, f"{TTL} s", timeout(self.random), permits, bound],
            )
        except psycopg.Error as error:
            self.failed(attempt, error)
            return None
        if token is None:
            self.history.note("refuse", attempt=attempt)
            return None
        self.history.note("grant", attempt=attempt, resources=[f"lease:{name}"], token=token, pid=session.pid)
        return Lease(attempt, name, token, bound)

    def from_any_session(self, lease: Lease, do: Callable[[Session], Any]) -> Any:
        """Do it from a new connection if the one we have is lost; a bound lease is lost with it."""
        while True:
            try:
                return do(self.connected())
            except Lost:
                if lease.bound:
                    raise

    def changes_under(self, lease: Lease) -> dict[str, int]:
        """What is to be written; nothing where there may be another with a permit."""
        if lease.name == COUNTING_LEASE:
            return {}
        resources = [f"lease:{lease.name}"]
        changes: dict[str, int] = self.from_any_session(
            lease, lambda session: self.changes(session, lease.attempt, "exclusive", resources)
        )
        self.dawdle()
        return changes

    def renew(self, lease: Lease) -> bool:
        """Whether the lease is still ours; it is as long as nobody says that it is not."""
        session = self.connected()
        self.history.note("renew", attempt=lease.attempt)
        outcome = "acked"
        try:
            session.run("SELECT lease_renew(%s, %s)", [lease.name, lease.token])
        except Lost:
            outcome = "unknown"
            if lease.bound:
                raise
        except psycopg.Error as error:
            outcome = "refused" if _is_refusal(error) else "unknown"
        finally:
            self.history.note("renewed", attempt=lease.attempt, outcome=outcome)
        return outcome != "refused"

    def guarded_write(self, lease: Lease, changes: dict[str, int]) -> str:
        """Write in one transaction with the guard; the outcome."""
        session = self.connected()
        write = self.note_write(lease.attempt, changes, lease.token)
        outcome = "failed"
        try:
            session.run("BEGIN")
            session.run("SELECT lease_guard(%s, %s)", [lease.name, lease.token])
            self.history.note("guarded", write=write)
            self.think()
            self.dawdle()
            session.run("SELECT put_down(%s, %s, %s, %s)", _row(write, changes, lease.token))
        except (Lost, psycopg.Error) as error:
            if _is_refusal(error):
                outcome = "refused"
            self.history.note("written", write=write, outcome=outcome)
            if not isinstance(error, Lost):
                session.run_in_any_case("ROLLBACK")
            elif lease.bound:
                raise
            return outcome
        self.history.note("commit", write=write)
        try:
            self.finish_write(session, write, "COMMIT")
        except (Lost, psycopg.Error):
            return "unknown"
        return "acked"

    def release(self, lease: Lease) -> None:
        """Give it back, and now and then keep it closed for a moment."""
        keep = 0.2 if lease.name != COUNTING_LEASE and self.random.random() < 0.1 else None
        parameters = [lease.name, lease.token, f"{keep} s" if keep else None]
        self.history.note("release", attempt=lease.attempt, keep=keep)
        with suppress(psycopg.errors.QueryCanceled):
            [(gave,)] = self.from_any_session(
                lease, lambda session: session.run("SELECT lease_release(%s, %s, %s)", parameters)
            )
            self.history.note("released", attempt=lease.attempt, gave=gave)


def _is_refusal(error: Exception) -> bool:
    """Whether a lease is not ours any more."""
    return isinstance(error, (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState))


def _row(write: str, changes: dict[str, int], token: int | None = None) -> list[Any]:
    return [write, list(changes), list(changes.values()), token]


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
