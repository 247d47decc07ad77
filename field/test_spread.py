"""Names spread over clusters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import psycopg
import pytest

import psycopg_locks
from server import Server, throwaway_server
from spread import RAISE_TOKENS, home, homes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = [f"job:{number}" for number in range(3000)]


@pytest.fixture(scope="module")
def clusters(server: Server, bindir: Path, runas: str | None) -> Iterator[dict[str, Server]]:
    """Two."""
    with throwaway_server(bindir, runas) as other:
        yield {"one": server, "two": other}


def test_each_has_its_share_and_keeps_it() -> None:
    share = Counter(home(name, ["one", "two"]) for name in NAMES)
    assert min(share.values()) > len(NAMES) / 2 * 0.9
    moved = [name for name in NAMES if home(name, ["two", "one", "three"]) != home(name, ["one", "two"])]
    assert {home(name, ["one", "two", "three"]) for name in moved} == {"three"}
    assert len(NAMES) / 3 * 0.9 < len(moved) < len(NAMES) / 3 * 1.1


def test_all_clients_meet_at_a_names_home(clusters: dict[str, Server]) -> None:
    for name in NAMES[:10]:
        at = clusters[home(name, clusters)]
        with at.connect("a") as a, at.connect("b") as b, psycopg_locks.session_lock(a, name):
            assert b.execute("SELECT named_lock(%s, '0')", [name]).fetchone() == (False,)


def test_a_name_that_moves_is_locked_at_both(clusters: dict[str, Server]) -> None:
    before, after = ["one"], ["one", "two"]
    name = next(name for name in NAMES if home(name, after) == "two")
    assert homes(name, before, after) == ["one", "two"]
    assert homes(name, after, after) == ["two"]
    for known in ([home(name, before)], [home(name, after)], homes(name, before, after)):
        with clusters["one"].connect("a") as a, clusters["two"].connect("b") as b:
            for conn in (a, b):
                assert conn.execute("SELECT named_lock(%s, '0')", [name]).fetchone() == (True,)
            assert not any(_is_free(clusters[label], name) for label in known)


def _is_free(cluster: Server, name: str) -> bool:
    with cluster.connect("c") as conn:
        return conn.execute("SELECT named_lock(%s, '0')", [name]).fetchone() == (True,)


def test_tokens_of_a_new_home_are_raised(clusters: dict[str, Server]) -> None:
    old, new = clusters["one"], clusters["two"]
    with old.superuser() as conn:
        conn.execute(RAISE_TOKENS, {"old": _last_token(conn)})  # as after a failover
        before = _grant(conn)
        last = _last_token(conn)
    with new.superuser() as conn:
        assert _grant(conn) < before
        conn.execute(RAISE_TOKENS, {"old": last})
        raised = _grant(conn)
        assert raised > before
        conn.execute(RAISE_TOKENS, {"old": last})
        assert raised < _grant(conn) < raised + 1000  # it was there already


def _last_token(conn: psycopg.Connection) -> int:
    [(last,)] = conn.execute("SELECT last_value FROM _lease_token")
    return int(last)


def _grant(conn: psycopg.Connection) -> int:
    [(token,)] = conn.execute("SELECT token FROM lease_acquire('moves', '1 min')")
    conn.execute("SELECT lease_release('moves', %s)", [token])
    return int(token)
