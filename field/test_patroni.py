"""A leader elected over leases, in a PostgreSQL cluster that is switched over and that fails over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import candidate
from load import TABLES, accepted
from notes import Note, Span, overlaps, read
from patroni_cluster import Cluster, patroni_cluster
from polling import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server import Server

    Figures = Callable[[str], None]

CANDIDATES = [f"candidate-{number}" for number in range(1, 4)]
MANY = 30  # writes


@pytest.fixture(scope="module")
def nodes(bindir: Path, runas: str | None) -> Iterator[Cluster]:
    """Two nodes, for all tests here."""
    with patroni_cluster(bindir, runas) as cluster:
        yield cluster


@pytest.fixture(params=[False, True], ids=["asynchronous", "synchronous_mode"])
def cluster(nodes: Cluster, request: pytest.FixtureRequest) -> Cluster:
    """Two nodes, of which one streams to the other in either way."""
    nodes.set_synchronous(request.param)
    return nodes


class Candidates:
    """Processes that want to lead."""

    def __init__(self, conninfo: str, store: Server, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, candidate.__file__, client, conninfo, store.conninfo, str(folder)],
                env=environment,
                start_new_session=True,
            )
            for client in CANDIDATES
        ]

    def notes(self, what: str, since: float = 0) -> list[Note]:
        """All notes of that so far. All candidates live."""
        assert all(process.poll() is None for process in self._processes)
        return [note for note in read(self.folder) if note.what == what and note.at >= since]

    def stop(self) -> None:
        """End all, by force those that don't."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def candidates(cluster: Cluster, server: Server, tmp_path: Path) -> Iterator[Candidates]:
    """Three processes, with a table in the cluster for guarded writes, and a store elsewhere that looks at the tokens."""
    with cluster.until_replicated().superuser("demo") as conn:
        conn.execute("DROP TABLE IF EXISTS log")
        conn.execute("SET ROLE demo")
        conn.execute(candidate.LOG)
    with server.connect("store") as conn:
        conn.execute("DROP TABLE IF EXISTS target, accepted")
        conn.execute(TABLES)
    candidates = Candidates(cluster.conninfo, server, tmp_path)
    yield candidates
    candidates.stop()


class Term(NamedTuple):
    """What one leader did with one token."""

    span: Span
    token: int
    writes: int


def terms(notes: list[Note]) -> list[Term]:
    """All terms, in the order of time. One ends when the leader knows that it is lost, or when its TTL is over."""
    found = []
    for note in notes:
        if note.what == "leads":
            token = note.details["token"]
            [end] = [other for other in notes if other.what == "leads no more" and other.details["token"] == token]
            writes = sum(other.what == "wrote" and other.details["token"] == token for other in notes)
            found.append(Term(Span(note.at, min(end.at, end.details["until"]), note.client), token, writes))
    return found


def test_leader_election(cluster: Cluster, candidates: Candidates, server: Server, figures: Figures) -> None:
    events: list[tuple[float, str]] = []

    def happened(what: str) -> float:
        events.append((time.monotonic(), what))
        return events[-1][0]

    def until_one_leads(what: str) -> float:
        since = happened(what)
        until("one leads, and writes", lambda: len(candidates.notes("wrote", since)) >= MANY, 120)
        return time.monotonic()

    until_one_leads("begin")

    old = cluster.until_replicated()
    new = cluster.standby_of(old)
    switchover = happened(f"switchover from {old.name} to {new.name}")
    cluster.switchover(old)
    switched = until_one_leads(f"{new.name} is the primary")

    old = cluster.until_replicated()
    new = cluster.standby_of(old)
    with cluster.link_at_a_standstill(old):
        standstill = happened(f"{old.name} sends nothing to {new.name} any more")
        if cluster.is_synchronous:
            with old.superuser("demo") as conn:
                waiting = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND usename = 'demo'"
                until("the leader waits for the standby", lambda: conn.execute(waiting).fetchone() is not None)
        else:
            until("the leader goes on", lambda: len(candidates.notes("wrote", standstill)) >= MANY)
        failover = happened(f"{old.name} is killed, Patroni and PostgreSQL")
        old.kill()
    until("the other node takes over", lambda: cluster.primary() is new)
    failed_over = until_one_leads(f"{new.name} is the primary")

    happened(f"{old.name} comes back")
    old.start()
    cluster.until_replicated()
    until_one_leads(f"{old.name} is a standby")
    candidates.stop()

    notes = read(candidates.folder)
    wrote = [note for note in notes if note.what == "wrote"]
    led = terms(notes)
    both = overlaps(term.span for term in led)
    with server.connect("check") as conn:
        elsewhere = accepted(conn, candidate.LEASE)
    with new.superuser("demo") as conn:
        log = conn.execute("SELECT client, number, token FROM log ORDER BY id").fetchall()
    logged = {(client, number) for client, number, _ in log}
    lost = [note for note in wrote if (note.client, note.details["number"]) not in logged]

    for line in story(events, led):
        figures(line)
    gaps = [gap(wrote, switchover, switched), gap(wrote, failover, failed_over)]
    figures("no leader wrote for {:.2f} s at the switchover, for {:.2f} s at the failover".format(*gaps))
    refused = sum(note.what == "refused elsewhere" for note in notes)
    figures(
        f"{len(wrote)} acknowledged writes, {len(lost)} of them lost at the failover; {refused} refused elsewhere; "
        f"two leaders at once: {len(both)}"
    )

    # Each token is one leader's, later ones are higher, and nobody has written after one with a higher token: here by
    # the guard, elsewhere by the check.
    assert [term.token for term in led] == sorted({term.token for term in led})
    assert [token for *_, token in log] == sorted(token for *_, token in log)
    assert [token for token, _ in elsewhere] == sorted(token for token, _ in elsewhere)
    assert {*elsewhere} <= {(term.token, term.span.client) for term in led}
    assert max(gaps) < 60
    if cluster.is_synchronous:
        assert not both
        assert not lost
    else:
        # What was acknowledged while the link stood still: the last writes, and nothing before them.
        assert lost
        assert lost == [note for note in wrote if note.details["server"] == old.port][-len(lost) :]


def story(events: list[tuple[float, str]], led: list[Term]) -> list[str]:
    """Who led when, in seconds since the beginning."""
    begin = events[0][0]
    lines = [(at, f"{at - begin:7.2f}           {what}") for at, what in events]
    for term in led:
        start, end = term.span.start - begin, term.span.end - begin
        line = f"{start:7.2f} to {end:6.2f} {term.span.client} led with token {term.token}: {term.writes} writes"
        lines.append((term.span.start, line))
    return [line for _, line in sorted(lines)]


def gap(wrote: list[Note], start: float, end: float) -> float:
    """The longest time without a write of which a part lies between the two."""
    times = [note.at for note in wrote]
    return max(later - earlier for earlier, later in zip(times, times[1:]) if earlier < end and later > start)
