"""What the demonstrations share: client processes, checks, and a look at the two views."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection as Pipe
    from multiprocessing.process import BaseProcess

    from server import Server

PATIENCE = 10.0  # seconds for anything that should happen at once

# Clients are forked from a process that has psycopg loaded and no connection open.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["psycopg"])


class Answer(NamedTuple):
    """What a client returned, or how it failed."""

    client: str
    value: Any = None
    error: str | None = None


class Crew:
    """Client processes with one connection each, known by their application_name. All stay connected to the end."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._clients: dict[str, tuple[BaseProcess, Pipe]] = {}

    def add(self, client: str, play: Callable[..., Any], *arguments: Any) -> None:
        """Start a process that connects and stands ready to call `play(connection, *arguments)`."""
        ours, theirs = _processes.Pipe()
        process = _processes.Process(
            target=_client, args=(theirs, self._conninfo, client, play, arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._clients[client] = (process, ours)

    def go(self) -> None:
        """Let all begin together, once all are connected."""
        waiting = [(client, pipe) for client, (_, pipe) in self._clients.items()]
        for client, pipe in waiting:
            hello = _receive(client, pipe)
            if hello.error:
                raise RuntimeError(f"{client}: {hello.error}")
        for _, pipe in waiting:
            pipe.send("go")

    def answered(self) -> int:
        """How many have answered already."""
        return sum(pipe.poll() for _, pipe in self._clients.values())

    def answer(self, client: str) -> Answer:
        """What this one has to say."""
        return _receive(client, self._clients[client][1])

    def answers(self) -> list[Answer]:
        """What each has to say, in the order of their start."""
        return [self.answer(client) for client in self._clients]

    def kill(self, client: str) -> None:
        """SIGKILL: the process has no chance to say goodbye."""
        self._clients[client][0].kill()

    def terminate(self, client: str) -> None:
        """SIGTERM: what an orchestrator sends to a process that should end."""
        self._clients[client][0].terminate()

    def pause(self, client: str) -> None:
        """SIGSTOP: the process stands still wherever it is."""
        self._send_signal(client, signal.SIGSTOP)

    def resume(self, client: str) -> None:
        """SIGCONT: it goes on, and has not noticed anything."""
        self._send_signal(client, signal.SIGCONT)

    def _send_signal(self, client: str, number: signal.Signals) -> None:
        pid = self._clients[client][0].pid
        assert pid is not None, f"{client} was never started"
        os.kill(pid, number)

    def close(self) -> None:
        """End all: by asking, and after a second by force."""
        for process, pipe in self._clients.values():
            pipe.close()
            process.terminate()
        deadline = time.monotonic() + 1.0
        for process, _ in self._clients.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _receive(client: str, pipe: Pipe) -> Answer:
    try:
        if pipe.poll(PATIENCE):
            answer: Answer = pipe.recv()
            return answer
        return Answer(client, error="no answer")
    except EOFError:
        return Answer(client, error="the process is gone")


def _client(pipe: Pipe, conninfo: str, client: str, play: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """The life of a client process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C: end without a word
    try:
        with psycopg.connect(conninfo, application_name=client, autocommit=True) as conn:
            pipe.send(Answer(client, "ready"))
            pipe.recv()
            pipe.send(Answer(client, play(conn, *arguments)))
            pipe.recv()
    except (EOFError, ConnectionError):
        pass  # the demonstration is over
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        with suppress(ConnectionError):
            pipe.send(Answer(client, error=f"{type(error).__name__}: {' '.join(str(error).split())}"))


@contextmanager
def crew_of(server: Server) -> Iterator[Crew]:
    """Client processes that are gone when the block ends."""
    crew = Crew(server.conninfo)
    try:
        yield crew
    finally:
        crew.close()


@contextmanager
def held_up(server: Server, table: str, mode: str) -> Iterator[None]:
    """Hold a table lock for the block.

    Whoever needs the table is held up in the middle of its work: that keeps the window of a race open for as long as
    the others need to run into it.
    """
    with server.connect("stage") as conn, conn.transaction():
        conn.execute(sql.SQL("LOCK TABLE {} IN {} MODE").format(sql.Identifier(table), sql.SQL(mode)))
        yield


class Checks:
    """Says of each thing that should be so whether it is, and counts."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def that(self, holds: bool, what: str, otherwise: object = "") -> bool:
        """Check one thing; `otherwise` is told when it is not so."""
        if holds:
            self.passed += 1
            print(f"   ok      {what}")
        else:
            self.failed += 1
            print(f"   FAILED  {what}" + (f": {otherwise}" if otherwise != "" else ""))
        return holds

    def until(self, what: str, holds: Callable[[], bool]) -> bool:
        """Wait until something is so; too late counts as not so."""
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                return self.that(False, what, f"not within {PATIENCE:.0f} s")
            time.sleep(0.01)
        return self.that(True, what)

    def no_errors(self, answers: Sequence[Answer]) -> bool:
        """None of the clients failed."""
        errors = [f"{answer.client}: {answer.error}" for answer in answers if answer.error]
        return self.that(not errors, "no client saw an error", "; ".join(errors))


def count(conn: psycopg.Connection, view: str) -> int:
    """How many rows a table or view has."""
    [(rows,)] = conn.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(view)))
    return int(rows)


def show_locks(conn: psycopg.Connection) -> None:
    """Print who holds and who waits at this moment."""
    show(
        conn,
        "lock_holders",
        """SELECT name, kind, mode, pid, application_name, state, token, owner, payload, held_for, hold_limit,
                  remaining, waiters
             FROM lock_holders ORDER BY acquired_at""",
    )
    show(
        conn,
        "lock_waiters",
        """SELECT name, mode, pid, application_name, waited, deadline - clock_timestamp() AS time_left,
                  queue_position, blocked_by
             FROM lock_waiters ORDER BY name, queue_position""",
    )


def show(conn: psycopg.Connection, title: str, query: str) -> None:
    """Print a query's rows, aligned, with a title in the first column's head.

    Columns without a value in any row are left out.
    """
    cursor = conn.execute(query)
    names = [column.name for column in cursor.description or []]
    names[0] = f"{title}.{names[0]}"
    rows = [[_cell(value) for value in row] for row in cursor]
    used = [at for at in range(len(names)) if any(row[at] for row in rows)]
    lines = [[cells[at] for at in used] for cells in [names, *rows]] if rows else [[f"{title}: no rows"]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    for line in lines:
        print("     " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():.3f} s"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
