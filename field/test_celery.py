"""The example for Celery: three Beats, one schedules. Ticks are counted where they arrive."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polling import until
from stage import count, held_up
from views import lease_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from programs import Program, Programs
    from server import Server

FIELD = Path(__file__).parent
EXAMPLES = FIELD.parent / "examples/clients/python"
LEASE = "beat:app"
# As in beat_app.py.
INTERVAL = 0.5
TTL = 3.0
# How late a busy machine may be.
SLACK = 3.0


@pytest.fixture
def conn(server: Server) -> Iterator[psycopg.Connection]:
    """Somebody who looks on."""
    with server.connect("field") as conn:
        conn.execute("DROP TABLE IF EXISTS beat_run, tick, kombu_message, kombu_queue")
        conn.execute("DROP SEQUENCE IF EXISTS queue_id_sequence, message_id_sequence")
        conn.execute("CREATE TABLE tick (run bigint, run_at timestamptz, token bigint)")
        yield conn


@pytest.fixture
def celery(server: Server, programs: Programs) -> Callable[..., Program]:
    """Start a program of the app."""
    broker = f"sqla+postgresql+psycopg://demo@127.0.0.1:{server.port}/demo"
    env = {"BEAT_BROKER": broker, "BEAT_CONNINFO": server.conninfo, "PYTHONPATH": f"{FIELD}:{EXAMPLES}"}

    def start(name: str, *arguments: str) -> Program:
        return programs.start(name, "-m", "celery", "-A", "beat_app", *arguments, "-l", "info", **env)

    return start


def is_there(conn: psycopg.Connection, table: str) -> bool:
    return conn.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone() == (True,)


def start_beats(celery: Callable[..., Program], number: int) -> dict[str, Program]:
    names = [f"beat-{at}" for at in range(1, number + 1)]
    return {name: celery(name, "beat", "-s", name, "--scheduler", "celery_beat:LeaseScheduler") for name in names}


def leader(conn: psycopg.Connection) -> str | None:
    return lease_owner(conn, LEASE)


def waits(conn: psycopg.Connection, name: str) -> bool:
    """Whether it stands by."""
    return conn.execute("SELECT 1 FROM lock_waiters WHERE application_name = %s", [name]).fetchone() is not None


def is_held_up(conn: psycopg.Connection, name: str) -> bool:
    """Whether it is about to claim a run, but for the table that the test has locked."""
    query = """SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
                WHERE relation = 'beat_run'::regclass AND NOT granted AND application_name = %s"""
    return conn.execute(query, [name]).fetchone() is not None


def test_one_schedules_and_another_takes_over(
    conn: psycopg.Connection, celery: Callable[..., Program], figures: Callable[[str], None]
) -> None:
    def arrived() -> int:
        [(ticks,)] = conn.execute("SELECT count(*) FROM tick WHERE token = (SELECT max(token) FROM tick)")
        return int(ticks)

    def terms() -> int:
        [(tokens,)] = conn.execute("SELECT count(DISTINCT token) FROM tick")
        return int(tokens)

    def next_term(number: int) -> str:
        until(f"term {number}: ticks arrive", lambda: terms() == number and arrived() >= 3)
        name = leader(conn)
        assert name is not None
        return name

    celery("worker", "worker", "--pool", "solo", "--without-gossip", "--without-mingle", "--without-heartbeat")
    until("the worker has made the broker's tables", lambda: is_there(conn, "kombu_message"))
    beats = start_beats(celery, 3)
    killed = next_term(1)
    until("two stand by", lambda: all(waits(conn, name) for name in beats if name != killed))
    beats[killed].send(signal.SIGKILL)

    paused = next_term(2)
    beats[paused].send(signal.SIGSTOP)
    told_to_end = next_term(3)
    assert {killed, paused, told_to_end} == set(beats)
    beats[paused].send(signal.SIGCONT)
    until("the paused one stands by again", lambda: waits(conn, paused))
    assert leader(conn) == told_to_end

    beats[told_to_end].send(signal.SIGTERM)
    assert beats[told_to_end].result() == 0
    assert next_term(4) == paused
    beats[paused].send(signal.SIGTERM)
    assert beats[paused].result() == 0
    assert leader(conn) is None

    [(runs,)] = conn.execute("SELECT total_run_count FROM beat_run")
    until("all that was sent has arrived", lambda: count(conn, "tick") == count(conn, "kombu_message"))
    ticks = conn.execute("SELECT run, token, extract(epoch FROM run_at)::float8 FROM tick ORDER BY run").fetchall()
    numbers, tokens, times = zip(*ticks)
    assert len(set(numbers)) == len(numbers), "a run has arrived twice"
    assert sorted(tokens) == list(tokens), "a leader of the past has sent"
    # One that is claimed and not sent: by a kill, a pause or an end at that moment.
    assert runs - len(numbers) <= 3
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    assert min(gaps) > INTERVAL - 0.05, "two in one interval"
    assert max(gaps) < TTL + INTERVAL + SLACK
    figures(f"{len(times)} ticks in {terms()} terms, from {min(gaps):.2f} to {max(gaps):.2f} s between them")


def test_a_leader_paused_at_its_claim_sends_nothing_when_it_wakes_up(
    server: Server, conn: psycopg.Connection, celery: Callable[..., Program]
) -> None:
    def queued() -> list[int]:
        """The numbers of the runs in the queue: there is no worker."""
        messages = "SELECT (payload::jsonb #>> '{headers, beat_run}')::int FROM kombu_message ORDER BY 1"
        return [run for (run,) in conn.execute(messages)] if is_there(conn, "kombu_message") else []

    beats = start_beats(celery, 2)
    until("one leads", lambda: leader(conn) and queued())
    first = leader(conn)
    [second] = set(beats) - {first}
    until("the other stands by", lambda: waits(conn, second))
    with held_up(server, "beat_run", "SHARE ROW EXCLUSIVE"):
        until("the leader claims a run", lambda: is_held_up(conn, first))
        beats[first].send(signal.SIGSTOP)
        before = queued()
        until("the other leads, and claims the same run", lambda: is_held_up(conn, second))
        assert leader(conn) == second
    until("it sends", lambda: len(queued()) > len(before) + 1)
    beats[first].send(signal.SIGCONT)
    until("the first stands by", lambda: waits(conn, first))
    assert "leads no more" in beats[first].output
    after = queued()
    assert after == list(range(1, len(after) + 1)), "each run once"
