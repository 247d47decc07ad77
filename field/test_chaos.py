"""Sixteen clients lock and write while sessions, processes, the server and the pooler are ended under them.

What they did and saw is then compared with what the documentation promises: see chaos/checker.py.
NAMED_LOCKS_SEED=n makes the same trouble again (whom it meets is up to the machine).
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaos.asks import COUNTING_LEASE, LEASES, LEAVES, LOCKS, PERMITS, SEMAPHORES, all_resources
from chaos.checker import Findings, Row, Witness, check
from chaos.clients import TABLES, Clients
from chaos.history import read_histories
from chaos.session import Route
from chaos.trouble import PER_MINUTE, ChaosServer, Troublemaker
from polling import PATIENCE, until
from pooler import Pooler
from server import throwaway_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

ROUTES = ["direct"] * 8 + ["session"] * 4 + ["transaction"] * 4
POOLS = {"session": 10, "transaction": 3}  # the one has room for all of its clients, the other not
MINUTE = 60.0

FORMS = {
    *("named_lock", "named_lock_wait", "named_lock_all", "named_lock_any", "named_lock_tree", "named_semaphore"),
    *("named_xact_lock", "named_xact_lock_all", "named_xact_lock_any", "named_xact_lock_tree"),
    *("lease_acquire", "lease_acquire_wait"),
}

LEFTOVERS = """
    SELECT 'held: ' || h::text FROM (SELECT kind, name, mode, pid, state, token FROM lock_holders) AS h
    UNION ALL SELECT 'waited for: ' || w::text FROM (SELECT kind, name, pid FROM lock_waiters) AS w
    UNION ALL SELECT 'in pg_locks: ' || l::text FROM pg_locks AS l WHERE locktype = 'advisory'
"""


@pytest.fixture
def seed() -> str:
    """What decides the schedule of the trouble, and each client's choices."""
    return os.environ.get("NAMED_LOCKS_SEED") or str(random.SystemRandom().randrange(1_000_000))


@pytest.fixture(scope="module")
def chaos_server(bindir: Path, runas: str | None) -> Iterator[ChaosServer]:
    """A server that may be treated badly."""
    with throwaway_server(bindir, runas, ChaosServer) as server:
        with server.superuser() as conn:
            # Whoever waits and has lost its client leaves the queue.
            conn.execute("ALTER SYSTEM SET client_connection_check_interval = '200 ms'")
            conn.execute("SELECT pg_reload_conf()")
        with server.connect("tables") as conn:
            conn.execute(TABLES)
        yield server


@pytest.fixture
def poolers(chaos_server: ChaosServer) -> Iterator[dict[str, Pooler]]:
    """Two PgBouncers before it, by their mode."""
    with ExitStack() as stack:
        poolers = {}
        for mode, size in POOLS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="named_locks-", dir="/tmp")))
            poolers[mode] = Pooler(chaos_server, folder, mode, size)
            with (folder / "ini").open("a") as ini:
                ini.write("server_login_retry = 1\n")  # seconds, after a crash of the server, instead of 15
            stack.callback(poolers[mode].stop)
            poolers[mode].start()
        yield poolers


@contextmanager
def clients_of(server: ChaosServer, folder: Path, routes: Sequence[Route], seed: str) -> Iterator[Clients]:
    """Clients at work, all counters at zero; they are gone at the end of the block."""
    with server.connect("tables") as conn:
        conn.execute("TRUNCATE counter, ledger")
        conn.execute("INSERT INTO counter SELECT unnest(%s::text[]), 0", [all_resources()])
    clients = Clients(folder, routes, seed)
    try:
        yield clients
    finally:
        clients.close()


def what_is_left(server: ChaosServer) -> Witness:
    """What the database says when all have ended and all leases are over."""
    witness = Witness()
    with server.superuser() as conn:

        def look() -> bool:
            witness.leftovers = [what for (what,) in conn.execute(LEFTOVERS)]
            return not witness.leftovers

        deadline = time.monotonic() + PATIENCE
        while not look() and time.monotonic() < deadline:
            time.sleep(0.1)
        witness.leftovers += cannot_be_had(conn)
        witness.ledger = [Row(*row) for row in conn.execute("SELECT write, resource, value, token FROM ledger")]
        witness.counters = dict(conn.execute("SELECT resource, value FROM counter").fetchall())
    return witness


def cannot_be_had(conn: psycopg.Connection) -> Iterator[str]:
    """What is not free, although nobody has it."""
    slots = [name for name, permits in SEMAPHORES.items() for _ in range(permits)]
    leases = [(name, 1) for name in LEASES] + [(COUNTING_LEASE, PERMITS)] * PERMITS
    calls = [("named_lock(%s, '0')", [name]) for name in LOCKS + LEAVES]
    calls += [("named_semaphore(%s, %s, '0') IS NOT NULL", [name, SEMAPHORES[name]]) for name in slots]
    calls += [("acquired FROM lease_acquire(%s, '1 min', permits => %s)", list(lease)) for lease in leases]
    for call, parameters in calls:
        if conn.execute(f"SELECT {call}", parameters).fetchone() != (True,):
            yield f"not free: {call} {parameters}"
    conn.execute("SELECT named_unlock_all()")
    for name, _ in leases:
        conn.execute("SELECT lease_break(%s)", [name])


def tell(findings: Findings, figures: Callable[[str], None], seed: str) -> None:
    """The figures of a run."""
    grants = ", ".join(f"{count} {form}" for form, count in sorted(findings.grants.items()))
    troubles = ", ".join(f"{count} {what}" for what, count in sorted(findings.troubles.items()))
    writes = findings.writes
    figures(f"seed {seed}")
    figures(f"grants: {sum(findings.grants.values())} ({grants})")
    figures(f"refused or timed out: {findings.refusals}; cancelled: {findings.cancelled}")
    figures(f"trouble: {troubles}")
    figures(f"sessions lost: {findings.sessions_lost}, of these by their hold limit: {findings.by_hold_limit}")
    figures(
        f"writes: {writes['acked']} acknowledged, {writes['refused']} refused by the guard, {writes['failed']} not"
        f" committed, {writes['unknown']} without an answer ({findings.unknown_but_written} of them written)"
    )
    figures(f"violations: {len(findings.violations)}")


@pytest.mark.timeout(1200)
def test_chaos(
    chaos_server: ChaosServer,
    poolers: dict[str, Pooler],
    tmp_path: Path,
    figures: Callable[[str], None],
    seed: str,
    is_long: bool,
) -> None:
    print(f"NAMED_LOCKS_SEED={seed}")
    seconds = 10 * MINUTE if is_long else MINUTE
    conninfos = {"direct": chaos_server.conninfo, **{mode: pooler.conninfo for mode, pooler in poolers.items()}}
    routes = [Route(name, conninfos[name]) for name in ROUTES]
    with clients_of(chaos_server, tmp_path, routes, seed) as clients:
        troublemaker = Troublemaker(tmp_path, chaos_server, poolers, clients, seed)
        try:
            troublemaker.run(seconds)
        finally:
            troublemaker.close()
        assert clients.end(PATIENCE) == [], "clients that do not end"
    findings = check(read_histories(tmp_path), what_is_left(chaos_server))
    tell(findings, figures, seed)
    assert findings.violations == []
    assert findings.grants.keys() == FORMS
    assert findings.troubles.keys() == PER_MINUTE.keys()
    assert findings.writes["refused"] > 0, "no late write has met the guard"
    assert sum(findings.grants.values()) > 5 * seconds


@pytest.mark.parametrize(
    ("broken", "resource"),
    [
        pytest.param(
            """
            CREATE FUNCTION broken.named_xact_lock(
                name text, timeout interval DEFAULT NULL, mode named_lock_mode DEFAULT 'exclusive',
                cluster_wide boolean DEFAULT false)
                RETURNS boolean RETURN true
            """,
            "lock",
            id="a lock that is none",
        ),
        pytest.param(
            """
            CREATE FUNCTION broken.lease_guard(name text, token bigint) RETURNS void LANGUAGE plpgsql
            AS $$ BEGIN
                IF NOT lease_check(name, token) THEN
                    RAISE SQLSTATE '55000';
                END IF;
            END $$
            """,
            "lease",
            id="a guard that only looks",
        ),
    ],
)
def test_the_checker_sees(chaos_server: ChaosServer, tmp_path: Path, broken: str, resource: str) -> None:
    with chaos_server.superuser() as conn:
        conn.execute("CREATE SCHEMA broken")
        conn.execute("GRANT USAGE ON SCHEMA broken TO demo")
        conn.execute(broken)

        def has_lost_updates() -> bool:
            twice = "SELECT FROM ledger WHERE resource ~ %s GROUP BY resource, value HAVING count(*) > 1"
            return conn.execute(twice, [f"^{resource}:"]).fetchone() is not None

        # Found before the extension's own, under the same name and with the same arguments.
        route = Route("direct", f"{chaos_server.conninfo} options='-c search_path=broken,public'")
        two_holders = f" holders at once of {resource}:"
        try:
            with clients_of(chaos_server, tmp_path, [route] * 6, "broken") as clients:
                until("an update is lost", has_lost_updates)
                until("it sees two", lambda: any(two_holders in violation for violation in violations_so_far(tmp_path)))
                assert clients.end(PATIENCE) == []
            violations = check(read_histories(tmp_path), what_is_left(chaos_server)).violations
        finally:
            conn.execute("DROP SCHEMA broken CASCADE")
    assert any("lost update" in violation and f"brought {resource}:" in violation for violation in violations)


def violations_so_far(folder: Path) -> list[str]:
    """What the histories alone tell."""
    return check(read_histories(folder), Witness()).violations
