"""Side by side: a free lock, and back."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import beside
from beside import Contender, Contest
from common import Bench, execute
from servers import other_servers
from table import Entry, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EVEN = Target(">=", 1.0)

SYSTEMS = (
    Contender("named", "named", "postgres"),
    Contender("native", "native", "postgres"),
    Contender("polling", "polling", "postgres"),
    Contender("MariaDB", "mariadb", "mariadb"),
    Contender("Redis", "redis", "redis"),
)
# What PostgreSQL takes for the statements alone: nothing in it can be faster.
ROUND_TRIPS = "PostgreSQL's round trips alone"


def contests(clients: Sequence[int]) -> Iterator[Contest]:
    """Locks of sessions, then of transactions."""
    yield Contest(
        "lock; unlock",
        "pair",
        (*SYSTEMS, Contender(ROUND_TRIPS, "round_trips", "postgres")),
        clients,
        [beside.rate({contender.label: EVEN for contender in SYSTEMS[1:]})],
    )
    yield Contest(
        "begin; transaction lock; commit",
        "pair",
        (
            Contender("named", "named_transaction", "postgres"),
            Contender("native", "native_transaction", "postgres"),
            Contender(ROUND_TRIPS, "round_trips_transaction", "postgres"),
        ),
        clients,
        [beside.rate({"native": EVEN})],
    )


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Free names: each client a name of its own, over TCP, {effort.beside_rounds} rounds of all in turn, "
        f"{effort.beside_seconds:g} s each"
    )


def measure(bench: Bench) -> Iterator[Entry]:
    """All of them."""
    with closing(bench.server.connect("bench free")) as conn:
        execute(conn, beside.POLLING)
    with other_servers(bench.server.runas, "mariadb", "redis") as others:
        addresses = {"postgres": bench.server.conninfo, **others}
        for contest in contests(bench.effort.clients):
            yield from beside.entries(bench, contest, addresses)
