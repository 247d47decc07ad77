"""Side by side: leases that outlive their client, on the disk before the answer; and how soon a waiter wakes."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import beside
from beside import Contender, Contest, Figure, spread_of
from common import Bench, execute
from leases import BY_HAND
from servers import other_servers
from table import Entry, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOLD = (2.0, 12.0)  # milliseconds, by chance: a poller may be at any point of its sleep
OURS = Contender("lease", "lease", "postgres")
BY_HAND_SQL = Contender("SQL by hand", "hand", "postgres")
LAZY_BY_HAND = Contender("SQL by hand, release not waited for", "hand_lazy", "postgres")
REDIS = Contender("Redis, appendfsync always", "redis", "redis durable")
ETCD = Contender("etcd", "etcd", "etcd")
# What PostgreSQL takes for the statements and the commits alone: nothing in it can be faster.
COMMITS = Contender("PostgreSQL's round trips and commits alone", "round_trips_durable", "postgres")
ALL = (OURS, BY_HAND_SQL, REDIS, ETCD, COMMITS)
TARGETS = {BY_HAND_SQL.label: Target(">=", 1.1), ETCD.label: Target(">=", 3.0)}
VOLATILE = (
    Contender("lease", "lease", "postgres volatile"),
    Contender("SQL by hand", "hand", "postgres volatile"),
    Contender("Redis, no persistence", "redis", "redis"),
)
WAKE_UP = (
    Figure("median", "ms", spread_of("hand_over", "p50")),
    Figure("p99", "ms", spread_of("hand_over", "p99"), own=Target("<=", 5, "ms")),
)


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Leases side by side: each client its own, over TCP, {effort.beside_rounds} rounds of all in turn, "
        f"{effort.beside_seconds:g} s each (etcd: grant, transaction and revoke; keep-alive, which writes nothing); a "
        "waiter: from before the release to when it has the lease"
    )


def contests(clients: Sequence[int]) -> Iterator[Contest]:
    """All of them. Redis has to be beaten where many clients share one flush of the disk."""
    for case, work, targets in (
        ("acquire; release", "pair", TARGETS),
        ("renew", "renew", {BY_HAND_SQL.label: TARGETS[BY_HAND_SQL.label]}),
        ("a refused try", "refused", {}),
    ):
        few, many = clients[:-1], clients[-1:]
        contenders = (*ALL, LAZY_BY_HAND) if work == "pair" else ALL
        yield Contest(case, work, contenders, few, [beside.rate(targets)])
        ahead = {} if work == "refused" else {REDIS.label: Target(">=", 1.0)}
        yield Contest(case, work, contenders, many, [beside.rate({**targets, **ahead})])
    yield Contest("acquire; release, synchronous_commit off", "pair", VOLATILE, clients, [beside.rate({})])
    yield Contest("renew, synchronous_commit off", "renew", VOLATILE, clients, [beside.rate({})])
    yield Contest(
        "a waiter has it after the release", "alternate", (OURS, ETCD, REDIS, BY_HAND_SQL), (2,), WAKE_UP, HOLD, 6
    )


def measure(bench: Bench) -> Iterator[Entry]:
    """Rates, then the wake-up."""
    with closing(bench.server.connect("bench durable")) as conn:
        execute(conn, BY_HAND)
        execute(conn, "DELETE FROM hand_lease")
    with other_servers(bench.server.runas, "redis", "redis durable", "etcd") as others:
        addresses = {
            "postgres": bench.server.conninfo,
            "postgres volatile": f"{bench.server.conninfo} options='-c synchronous_commit=off'",
            **others,
        }
        for contest in contests(bench.effort.clients):
            # Before each slice, or the dead rows of one would be in the way of the next.
            yield from beside.entries(bench, contest, addresses, lambda: bench.server.vacuum("_lease", "hand_lease"))
