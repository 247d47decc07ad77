"""Systems side by side: in each round all of them in turn, in short slices, each round beginning with another one."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import generator
from table import Entry, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common import Bench

Report = dict[str, Any]

# As people write it; they mostly sleep ten times as long.
POLLING = """
CREATE OR REPLACE FUNCTION polling_lock(name text, timeout interval) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    deadline timestamptz := clock_timestamp() + timeout;
BEGIN
    LOOP
        IF pg_try_advisory_lock(hashtextextended(name, 0)) THEN
            RETURN true;
        END IF;
        IF clock_timestamp() >= deadline THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep(0.01);
    END LOOP;
END
$$"""


class Contender(NamedTuple):
    """Who takes part."""

    label: str
    system: str  # as the load generator calls it
    where: str  # which server


class Figure(NamedTuple):
    """What of a report is shown."""

    name: str
    unit: str
    of: Callable[[Report], float]
    targets: Mapping[str, Target] = {}
    own: Target | None = None  # for ours alone


class Contest(NamedTuple):
    """The same work for all; the first contender is ours."""

    case: str
    work: str
    contenders: Sequence[Contender]
    clients: Sequence[int]
    figures: Sequence[Figure]
    hold: tuple[float, float] = (0.0, 0.0)  # of the hot name, milliseconds: from, to
    stretch: int = 1  # slices are so many times as long


def rate(targets: Mapping[str, Target]) -> Figure:
    """Turns per second."""
    return Figure("", "1/s", lambda report: float(report["rate"]), targets)


def spread_of(what: str, quantile: str) -> Callable[[Report], float]:
    """Milliseconds, of one of the report's spreads."""
    return lambda report: float(report[what][quantile]) / 1e3


def entries(
    bench: Bench, contest: Contest, addresses: Mapping[str, str], before: Callable[[], object] = lambda: None
) -> Iterator[Entry]:
    """Run a contest; `before` each slice, something to do."""
    ours = contest.contenders[0].label
    for clients in contest.clients:
        seen = in_rounds(bench, contest, addresses, clients, before)
        for figure in contest.figures:
            values = {label: [figure.of(report) for report in reports] for label, reports in seen.items()}
            case = f"{contest.case}, {figure.name}" if figure.name else contest.case
            for label, its in values.items():
                entry = Entry(case, clients, "clients", label, figure.unit, its)
                if label == ours:
                    yield judged(entry, its, figure.own)
                else:
                    yield compared(entry, values[ours], figure.targets.get(label))


def judged(entry: Entry, values: Sequence[float], target: Target | None) -> Entry:
    """With a target for the median of these values."""
    if target is None:
        return entry
    return entry._replace(target=str(target), met=target.met_by(statistics.median(values)))


def compared(entry: Entry, ours: Sequence[float], target: Target | None) -> Entry:
    """With ours by this one's, round by round, whose median the target is for."""
    ratios = [our / its for our, its in zip(ours, entry.figures)]
    return judged(entry._replace(ratios=ratios), ratios, target)


def in_rounds(
    bench: Bench, contest: Contest, addresses: Mapping[str, str], clients: int, before: Callable[[], object]
) -> dict[str, list[Report]]:
    """The reports of each contender, one for each round."""
    effort = bench.effort
    seen: dict[str, list[Report]] = {contender.label: [] for contender in contest.contenders}
    for number in range(effort.beside_rounds):
        first = number % len(contest.contenders)
        for contender in (*contest.contenders[first:], *contest.contenders[:first]):
            before()
            report = generator.run(
                {
                    "system": contender.system,
                    "address": addresses[contender.where],
                    "work": contest.work,
                    "clients": clients,
                    "seconds": effort.beside_seconds * contest.stretch,
                    "warm_up": effort.beside_warm_up,
                    "hold": contest.hold,
                }
            )
            seen[contender.label].append(report)
    return seen
