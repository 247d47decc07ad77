"""The table: a line for each thing measured, with the target beside it."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common import Pairs

HEAD = ("", "unit", "native", "named", "named / native", "target", "met")
RATIO = "ratio"
DECIMALS = {RATIO: 3, "ms": 2}  # other units: none


class Target(NamedTuple):
    """What a figure has to reach."""

    sign: str
    limit: float
    unit: str = RATIO

    def __str__(self) -> str:
        """As it is printed."""
        return f"{self.sign} {self.limit:g} {'' if self.unit == RATIO else self.unit}".strip()

    def met_by(self, value: float) -> bool:
        """Whether it is reached."""
        return value >= self.limit if self.sign == ">=" else value <= self.limit


class Row(NamedTuple):
    """A line of the table."""

    what: str
    unit: str = ""
    native: str = ""
    named: str = ""
    ratio: str = ""
    target: str = ""
    met: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """As it is printed."""
        met = "" if self.met is None else "yes" if self.met else "no"
        return (*self[:-1], met)


class Section(NamedTuple):
    """The lines of a part, under its title; `failure` says why some are missing."""

    title: str
    rows: Sequence[Row]
    failure: str | None = None


def compared(what: str, unit: str, pairs: Pairs, target: Target | None = None) -> Row:
    """Both sides and the ratios round by round, whose median the target is for."""
    row = Row(what, unit, spread(pairs.native, unit), spread(pairs.named, unit), spread(pairs.ratios, RATIO))
    return _judged(row, statistics.median(pairs.ratios), target)


def stated(what: str, unit: str, native: float, named: float, target: Target | None = None) -> Row:
    """A figure of each side, where the target is for the named one's own."""
    return _judged(Row(what, unit, number(native, unit), number(named, unit)), named, target)


def _judged(row: Row, value: float, target: Target | None) -> Row:
    return row._replace(target=str(target), met=target.met_by(value)) if target else row


def spread(values: Sequence[float], unit: str) -> str:
    """Median, least and most."""
    return f"{number(statistics.median(values), unit)} ({number(min(values), unit)} .. {number(max(values), unit)})"


def number(value: float, unit: str) -> str:
    """A figure without its unit."""
    return f"{value:,.{DECIMALS.get(unit, 0)}f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of them don't exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def print_table(sections: Sequence[Section]) -> None:
    """Print all, the columns aligned over all of it."""
    lines = [HEAD, *(row.cells for section in sections for row in section.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    print(_aligned(HEAD, widths))
    for section in sections:
        print(f"\n{section.title}")
        for row in section.rows:
            print(_aligned(row.cells, widths))
        if section.failure:
            print(f"  NOT MEASURED: {section.failure}")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
