"""The examples for Node.js, Java, Go and Rust: the same plays for each."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, Callable

import pytest

from client_programs import BUILD, Built, ClientProcess
from polling import PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from server import Server

    Start = Callable[..., ClientProcess]

DONE, NOT_TO_BE_HAD, LOST, CANCELLED = 0, 3, 4, 5

TASKS, ROUNDS = 4, 5


@pytest.fixture(scope="module", params=list(BUILD))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The program of one language."""
    return BUILD[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def conn(server: Server) -> Iterator[psycopg.Connection]:
    """The test's own session, with new tables."""
    with server.connect("test") as conn:
        conn.execute("CREATE TABLE counter AS SELECT 0 AS value")
        conn.execute("CREATE TABLE written (token bigint)")
        yield conn
        conn.execute("SELECT lease_break('x')")  # of a test that failed
        conn.execute("DROP TABLE counter, written")


@pytest.fixture
def start(server: Server, built: Built, conn: psycopg.Connection) -> Iterator[Start]:
    """Starts processes, named a, b, ... to the server, which are gone after the test."""
    programs: list[ClientProcess] = []

    def start(*arguments: object) -> ClientProcess:
        program = built.start(server, chr(ord("a") + len(programs)), *arguments)
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.close()


def value(conn: psycopg.Connection, query: str) -> Any:
    """The one value of a query."""
    row = conn.execute(query).fetchone()
    assert row is not None
    return row[0]


def traces(conn: psycopg.Connection) -> list[Any]:
    """All that is held or waited for by others."""
    held = "SELECT 'holder', name, application_name FROM lock_holders WHERE application_name <> 'test'"
    waiting = "SELECT 'waiter', name, application_name FROM lock_waiters"
    return conn.execute(f"{held} UNION ALL {waiting}").fetchall()


@pytest.mark.parametrize("form", ["count", "count-xact"])
def test_no_step_is_lost(start: Start, conn: psycopg.Connection, form: str) -> None:
    programs = [start(form, "counter", TASKS, ROUNDS) for _ in range(2)]
    assert [program.answer() for program in programs] == [{"event": "counted"}] * 2
    assert value(conn, "SELECT value FROM counter") == 2 * TASKS * ROUNDS
    assert [program.end() for program in programs] == [DONE] * 2


def test_a_timeout_says_who_holds_the_lock(start: Start, conn: psycopg.Connection) -> None:
    holder = start("hold", "x")
    assert holder.answer() == {"event": "held"}
    late = start("hold", "x", 100)
    answer = late.answer()
    assert answer["event"] == "timeout"
    assert re.search(r"\ba\b", answer["detail"]), answer
    assert [name for *_, name in traces(conn)] == ["a"]
    assert late.end() == NOT_TO_BE_HAD
    holder.tell()
    assert holder.answer() == {"event": "released"}
    assert traces(conn) == []
    assert holder.end() == DONE


def test_a_cancelled_waiter_leaves_nothing(start: Start, conn: psycopg.Connection) -> None:
    conn.execute("SELECT named_lock('x')")
    waiter = start("hold", "x")
    until("it waits", lambda: traces(conn) == [("waiter", "x", "a")])
    waiter.tell()
    assert waiter.answer() == {"event": "cancelled"}
    # The process lives on.
    until("it has left the queue", lambda: traces(conn) == [])
    conn.execute("SELECT named_unlock('x')")
    assert traces(conn) == []
    assert waiter.end() == CANCELLED


def test_a_killed_holder_holds_nothing(start: Start, conn: psycopg.Connection) -> None:
    holder = start("hold", "x")
    assert holder.answer() == {"event": "held"}
    holder.send(signal.SIGKILL)
    assert value(conn, f"SELECT named_lock('x', '{PATIENCE} s')") is True
    conn.execute("SELECT named_unlock('x')")


def test_a_lock_lost_with_its_connection(start: Start, conn: psycopg.Connection) -> None:
    holder = start("hold", "x")
    assert holder.answer() == {"event": "held"}
    [(gone,)] = conn.execute("SELECT pg_terminate_backend(pid) FROM lock_holders").fetchall()
    assert gone
    until("the session has ended", lambda: traces(conn) == [])
    holder.tell()
    assert holder.answer() == {"event": "lost"}
    assert holder.end() == LOST


def test_a_lease_is_renewed_and_released(start: Start, conn: psycopg.Connection) -> None:
    holder = start("lease", "x", 1500)
    token = int(holder.answer()["token"])
    assert value(conn, "SELECT token FROM lock_holders") == token
    renewed = "SELECT count(*) FROM lock_holders WHERE expires_at - acquired_at > '2 s'"
    until("it is renewed", lambda: value(conn, renewed) == 1)
    late = start("lease", "x", 1500)
    answer = late.answer()
    assert (answer["event"], answer["holder"]) == ("taken", "a")
    assert 0 < answer["retry_after_ms"] <= 1500
    assert late.end() == NOT_TO_BE_HAD
    holder.tell()
    assert holder.answer() == {"event": "written"}
    assert holder.end() == DONE
    assert holder.answer() == {"event": "released"}
    assert conn.execute("SELECT token FROM written").fetchall() == [(token,)]
    assert traces(conn) == []


def test_a_broken_lease_stops_the_work(start: Start, conn: psycopg.Connection) -> None:
    holder = start("lease", "x", 1500)
    assert holder.answer()["event"] == "acquired"
    assert value(conn, "SELECT lease_break('x')") == 1
    assert holder.answer() == {"event": "lost", "sqlstate": "55000"}  # by the renewal
    assert holder.end() == LOST


def test_a_late_write_is_refused(start: Start, conn: psycopg.Connection) -> None:
    holder = start("lease", "x", 60_000)  # no renewal will be due
    assert holder.answer()["event"] == "acquired"
    conn.execute("SELECT lease_break('x')")
    successor = value(conn, "SELECT token FROM lease_acquire('x', '60 s')")
    holder.tell()
    assert holder.answer() == {"event": "lost", "sqlstate": "55006"}  # by the guard
    assert holder.end() == LOST
    assert value(conn, "SELECT count(*) FROM written") == 0
    assert value(conn, f"SELECT lease_release('x', {successor})") is True


def test_a_paused_holder_writes_nothing(start: Start, conn: psycopg.Connection) -> None:
    holder = start("lease", "x", 1000)
    token = int(holder.answer()["token"])
    holder.tell()
    assert holder.answer() == {"event": "written"}
    holder.send(signal.SIGSTOP)
    successor = value(conn, f"SELECT token FROM lease_acquire('x', '60 s', timeout => '{PATIENCE} s')")
    assert successor > token
    holder.tell()
    holder.send(signal.SIGCONT)
    answer = holder.answer()
    assert answer["event"] == "lost"
    # The renewal or the guard, or its own clock before these.
    assert answer["sqlstate"] in ("55006", None)
    assert holder.end() == LOST
    assert conn.execute("SELECT token FROM written").fetchall() == [(token,)]
    assert value(conn, f"SELECT lease_release('x', {successor})") is True
