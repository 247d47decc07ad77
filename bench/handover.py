"""Hand-over: several sessions want one lock, again and again."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from common import Bench, Figures, Side, in_turn
from stage import crew_of
from table import Row, Target, compared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import psycopg

LATENCY_TARGET = Target("<=", 1.05)
RATE_TARGET = Target(">=", 0.95)
FEWEST = 20  # a median of less says nothing

LOCK = "SELECT clock_timestamp(), {lock}, clock_timestamp()"  # called from left to right
UNLOCK = "SELECT clock_timestamp(), {unlock}"


class Hold(NamedTuple):
    """When a session asked for the lock, had it, and gave it back, by the server's clock."""

    asked: datetime
    had: datetime
    left: datetime
    session: int


def title(bench: Bench) -> str:
    """What is measured, and how."""
    effort = bench.effort
    return (
        f"Hand-over: client processes in a loop of lock; unlock on one name, {effort.contended_rounds} rounds, "
        f"{effort.contended_seconds:g} s each; latency: from before the unlock to after the next one's lock"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Latency and rate, for several numbers of sessions."""
    for sessions in bench.effort.contenders:
        latency, rate = in_turn(bench.effort.contended_rounds, partial(run, bench, sessions=sessions))
        yield compared(f"{sessions} sessions: median latency", "us", latency, LATENCY_TARGET)
        yield compared(f"{sessions} sessions: locks granted", "1/s", rate, RATE_TARGET)


def run(bench: Bench, side: Side, sessions: int) -> Figures:
    """Let them fight for a while; the median latency in microseconds, and how many locks were granted in a second."""
    with crew_of(bench.server) as crew:
        for session in range(sessions):
            crew.add(f"bench contender {session}", contend, side, bench.effort.contended_seconds)
        crew.go()
        answers = crew.answers()
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError("; ".join(errors))
    holds = [
        [Hold(asked, had, left, session) for asked, had, left in answer.value] for session, answer in enumerate(answers)
    ]
    return latency_of(holds), rate_of(holds)


def contend(conn: psycopg.Connection, side: Side, seconds: float) -> list[tuple[object, ...]]:
    """A contender's life: times of all its holds."""
    lock = LOCK.format(lock=side.lock.format("%s::text")).encode()
    unlock = UNLOCK.format(unlock=side.unlock.format("%s::text")).encode()

    def hold(name: str) -> tuple[object, ...]:
        [(asked, _, had)] = conn.execute(lock, (name,), prepare=True)
        [(left, _)] = conn.execute(unlock, (name,), prepare=True)
        return asked, had, left

    for _ in range(10):
        hold(f"bench:{conn.info.backend_pid}")  # to load the library and prepare the statements
    holds = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        holds.append(hold("bench:contended"))
    return holds


def latency_of(holds: list[list[Hold]]) -> float:
    """Median microseconds from one session's unlock to the lock of another that was waiting by then."""
    in_order = sorted((hold for of_one in holds for hold in of_one), key=lambda hold: hold.had)
    latencies = []
    for before, after in zip(in_order, in_order[1:]):
        if after.had < before.left:
            raise RuntimeError(f"two sessions held the lock at once: {before}, {after}")
        if after.session != before.session and after.asked < before.left:
            latencies.append((after.had - before.left).total_seconds() * 1e6)
    if len(latencies) < FEWEST:
        raise RuntimeError(f"only {len(latencies)} hand-overs were seen")
    return statistics.median(latencies)


def rate_of(holds: list[list[Hold]]) -> float:
    """Locks granted per second, in the time when all took part."""
    begin = max(of_one[0].asked for of_one in holds)
    end = min(of_one[-1].had for of_one in holds)
    granted = sum(begin <= hold.had <= end for of_one in holds for hold in of_one)
    return granted / (end - begin).total_seconds()
