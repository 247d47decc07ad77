"""Side by side: one name that all want."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import beside
from beside import Contest, Figure, spread_of
from common import Bench, execute
from free import SYSTEMS
from servers import other_servers
from table import INDEX, Entry, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = 1.0  # milliseconds that a client holds the lock for, in the second contest
FASTER, SOONER = Target(">=", 1.0), Target("<=", 1.0)
OTHERS = [contender.label for contender in SYSTEMS[1:]]

FIGURES = (
    beside.rate({label: FASTER for label in OTHERS}),
    Figure("hand-over, median", "ms", spread_of("hand_over", "p50"), {"native": SOONER}),
    Figure("hand-over, p99", "ms", spread_of("hand_over", "p99"), {"native": SOONER}),
    Figure("a client's wait, p99", "ms", spread_of("answer", "p99"), {label: SOONER for label in OTHERS}),
    Figure("fairness", INDEX, lambda report: float(report["fairness"]), own=Target(">=", 0.95)),
)


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"A hot name: clients in a loop of lock; unlock, {effort.beside_rounds} rounds of all in turn, "
        f"{effort.beside_seconds:g} s each; hand-over: from before the release to when another client that was waiting "
        "has it; fairness: Jain's index of the locks granted to each client, 1 if all got as many"
    )


def measure(bench: Bench) -> Iterator[Entry]:
    """Nothing to do but to hand it on, then with some work under the lock."""
    with closing(bench.server.connect("bench hot")) as conn:
        execute(conn, beside.POLLING)
    with other_servers(bench.server.runas, "mariadb", "redis") as others:
        addresses = {"postgres": bench.server.conninfo, **others}
        clients = bench.effort.hot_clients
        yield from beside.entries(bench, Contest("no work", "hot", SYSTEMS, clients, FIGURES), addresses)
        # Where nobody works, who polls is left alone by the others' sleep, and hands the lock to itself.
        working = Contest(f"{WORK:g} ms of work", "hot", SYSTEMS, clients, FIGURES, (WORK, WORK))
        yield from beside.entries(bench, working, addresses)
