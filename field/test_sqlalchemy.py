"""The examples for SQLAlchemy: locks in its transactions; with Alembic, processes that run `upgrade head` at once."""

from __future__ import annotations

import re
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

import sqlalchemy_locks
from polling import until
from stage import held_up
from views import held, waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from programs import Program, Programs
    from server import Server

PROJECT = Path(__file__).parents[1] / "examples/clients/python/alembic_project"
LOCK = "migrate:app"
STEPS = [" -> 0001", "0001 -> 0002", "0002 -> 0003"]


@pytest.fixture
def session(server: Server) -> Iterator[Session]:
    """A session of SQLAlchemy."""
    engine = sqlalchemy.create_engine(url(server))
    with Session(engine) as session:
        yield session
    engine.dispose()


@pytest.fixture
def conn(server: Server) -> Iterator[psycopg.Connection]:
    """Somebody who looks on, and an empty schema."""
    with server.connect("field") as conn:
        yield conn
        until("nothing is held", lambda: not held(conn))
        conn.execute("DROP TABLE IF EXISTS orders, alembic_version")


def url(server: Server) -> str:
    """Where SQLAlchemy connects."""
    return f"postgresql+psycopg://demo@127.0.0.1:{server.port}/demo"


def start(programs: Programs, server: Server, name: str, revision: str = "head", project: Path = PROJECT) -> Program:
    """A pod that migrates."""
    command = ["-m", "alembic", "-c", str(project / "alembic.ini"), "upgrade", revision]
    return programs.start(name, *command, DATABASE_URL=url(server))


def steps(program: Program) -> list[str]:
    """The migrations that it has begun."""
    return re.findall(r"Running upgrade (\S* -> \S+),", program.output)


def assert_migrated_once(conn: psycopg.Connection) -> None:
    assert conn.execute("SELECT version_num FROM alembic_version").fetchall() == [("0003",)]
    assert conn.execute("SELECT count(*) FROM orders").fetchall() == [(50000,)]
    valid = conn.execute(
        "SELECT indexrelid::regclass::text, indisvalid FROM pg_index WHERE indrelid = 'orders'::regclass"
    )
    assert sorted(valid) == [("orders_by_customer", True), ("orders_pkey", True)]


def test_locks_and_guards_in_a_session(session: Session, conn: psycopg.Connection) -> None:
    soon = timedelta(milliseconds=200)
    with session.begin():
        sqlalchemy_locks.lock_transaction(session, "report", soon)
        sqlalchemy_locks.lock_transaction(session, "report")
        assert conn.execute("SELECT kind, name, holds FROM lock_holders").fetchall() == [("transaction", "report", 2)]
    assert conn.execute("SELECT named_lock('report', '0')").fetchone() == (True,)
    with pytest.raises(sqlalchemy.exc.OperationalError, match="field") as refused, session.begin():
        sqlalchemy_locks.lock_transaction(session, "report", soon)
    assert sqlalchemy_locks.sqlstate(refused.value) == "55P03"
    conn.execute("SELECT named_unlock('report')")
    [(token,)] = conn.execute("SELECT token FROM lease_acquire('import', '1 min')")
    with session.begin():
        sqlalchemy_locks.guard(session, "import", token)
    with pytest.raises(sqlalchemy.exc.OperationalError) as refused, session.begin():
        sqlalchemy_locks.guard(session, "import", token - 1)
    assert sqlalchemy_locks.sqlstate(refused.value) == "55006"
    conn.execute("SELECT lease_release('import', %s)", [token])


def test_one_migrates_and_two_find_nothing_to_do(server: Server, conn: psycopg.Connection, programs: Programs) -> None:
    conn.execute("SELECT named_lock(%s)", [LOCK])
    pods = [start(programs, server, f"pod-{number}") for number in range(1, 4)]
    until("all wait", lambda: waiting(conn) == 3)
    snapshots = conn.execute(
        "SELECT pid FROM lock_waiters JOIN pg_stat_activity USING (pid) WHERE num_nonnulls(backend_xmin, backend_xid) > 0"
    )
    assert snapshots.fetchall() == []
    conn.execute("SELECT named_unlock(%s)", [LOCK])
    assert [pod.result() for pod in pods] == [0, 0, 0]
    assert sorted(map(steps, pods)) == [[], [], STEPS]
    assert_migrated_once(conn)


@pytest.mark.parametrize(
    ("step", "mode"),
    # The INSERT waits for the table; CREATE INDEX CONCURRENTLY begins and waits for those who write.
    [(STEPS[1], "SHARE"), (STEPS[2], "ROW EXCLUSIVE")],
    ids=["in a transaction", "at the concurrent index"],
)
def test_another_goes_on_where_one_was_killed(
    server: Server, conn: psycopg.Connection, programs: Programs, step: str, mode: str
) -> None:
    before, _ = step.split(" -> ")
    assert start(programs, server, "pod-0", before).result() == 0
    with held_up(server, "orders", mode):
        victim = start(programs, server, "pod-1")
        until(
            "it is in the middle of the step",
            lambda: conn.execute(
                """SELECT 1 FROM pg_stat_activity
                    WHERE application_name = 'pod-1' AND wait_event_type = 'Lock' AND query ~ '^(INSERT|CREATE)'"""
            ).fetchone(),
        )
        assert steps(victim) == [step]
        others = [start(programs, server, f"pod-{number}") for number in (2, 3)]
        until("two wait", lambda: waiting(conn) == 2)
        victim.send(signal.SIGKILL)
        victim.result()
        # The server is still at its statement, so nobody else may begin.
        assert conn.execute("SELECT application_name FROM lock_holders").fetchall() == [("pod-1",)]
        assert waiting(conn) == 2
    assert [pod.result() for pod in others] == [0, 0]
    assert sorted(map(steps, others)) == [[], STEPS[STEPS.index(step) :]]
    assert_migrated_once(conn)


def changed(folder: Path, text: str, by: str) -> Path:
    """A copy of the project with another text in its env.py."""
    project = folder / "project"
    shutil.copytree(PROJECT, project)
    env = project / "migrations/env.py"
    assert text in env.read_text()
    env.write_text(env.read_text().replace(text, by))
    return project


def test_waiting_has_an_end(server: Server, conn: psycopg.Connection, programs: Programs, tmp_path: Path) -> None:
    project = changed(tmp_path, "timedelta(minutes=10)", "timedelta(milliseconds=100)")
    conn.execute("SELECT named_lock(%s)", [LOCK])
    pod = start(programs, server, "pod-1", project=project)
    assert pod.result() == 1
    assert "TimeoutError: another migration" in pod.output
    assert steps(pod) == []
    conn.execute("SELECT named_unlock(%s)", [LOCK])


def test_waiters_with_a_snapshot_would_end_in_a_deadlock(
    server: Server, conn: psycopg.Connection, programs: Programs, tmp_path: Path
) -> None:
    """What wait_for_the_others() is for: the same env.py with a native lock."""
    call = "CALL named_lock_wait(:name, timeout => :timeout)"
    project = changed(tmp_path, call, "SELECT pg_advisory_lock(42)::text IS NOT NULL")
    conn.execute("SELECT pg_advisory_lock(42)")
    pods = [start(programs, server, f"pod-{number}", project=project) for number in range(1, 3)]
    until("both wait", lambda: waiting(conn) == 2)
    conn.execute("SELECT pg_advisory_unlock(42)")
    results = [pod.result() for pod in pods]
    assert any(results)
    assert any("deadlock detected" in pod.output for pod in pods)
