"""The table: a line for each thing measured, with the target beside it."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common import Pairs

HEAD = ("", "unit", "native", "named", "named / native", "target", "met")
HEAD_BESIDE = ("", "of", "system", "unit", "figure", "ours / it", "target", "met")
RATIO = "ratio"
INDEX = "index"
DECIMALS = {RATIO: 3, INDEX: 3, "ms": 2}  # other units: none


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
        return (*self[:-1], yes_or_no(self.met))


class Entry(NamedTuple):
    """One system's figures in one case, round by round; a line of the table too, and a point of a plot."""

    case: str
    x: int  # how many there are of what the axis says: clients, locks held
    axis: str
    system: str
    unit: str
    figures: list[float]
    ratios: list[float] = []  # noqa: RUF012 (ours by this one's; never changed)
    target: str = ""
    met: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """As it is printed."""
        at = f"{self.axis}: {self.x:,}"
        ratio = spread(self.ratios, RATIO) if self.ratios else ""
        return (
            self.case,
            at,
            self.system,
            self.unit,
            spread(self.figures, self.unit),
            ratio,
            self.target,
            yes_or_no(self.met),
        )


class Section(NamedTuple):
    """The lines of a part, under its title; `failure` says why some are missing."""

    title: str
    rows: Sequence[Row | Entry]
    failure: str | None = None
    name: str = ""


def compared(what: str, unit: str, pairs: Pairs, target: Target | None = None) -> Row:
    """Both sides and the ratios round by round, whose median the target is for."""
    row = Row(what, unit, spread(pairs.native, unit), spread(pairs.named, unit), spread(pairs.ratios, RATIO))
    return _judged(row, statistics.median(pairs.ratios), target)


def stated(what: str, unit: str, native: float, named: float, target: Target | None = None) -> Row:
    """A figure of each side, where the target is for the named one's own."""
    return _judged(Row(what, unit, number(native, unit), number(named, unit)), named, target)


def _judged(row: Row, value: float, target: Target | None) -> Row:
    return row._replace(target=str(target), met=target.met_by(value)) if target else row


def yes_or_no(met: bool | None) -> str:
    """Empty where there is no target."""
    return "" if met is None else "yes" if met else "no"


def spread(values: Sequence[float], unit: str) -> str:
    """Median, least and most."""
    return f"{number(statistics.median(values), unit)} ({number(min(values), unit)} .. {number(max(values), unit)})"


def number(value: float, unit: str) -> str:
    """A figure without its unit."""
    return f"{value:,.{DECIMALS.get(unit, 0)}f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of them don't exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


def head_of(section: Section) -> tuple[str, ...]:
    """What stands over its columns."""
    return HEAD_BESIDE if section.rows and isinstance(section.rows[0], Entry) else HEAD


def print_table(sections: Sequence[Section]) -> None:
    """Print all, the columns of each kind of line aligned over all of them."""
    for head in (HEAD, HEAD_BESIDE):
        shown = [section for section in sections if head_of(section) == head]
        lines = [head, *(row.cells for section in shown for row in section.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
        if shown:
            print(_aligned(head, widths))
        for section in shown:
            print(f"\n{section.title}")
            for row in section.rows:
                print(_aligned(row.cells, widths))
            if section.failure:
                print(f"  NOT MEASURED: {section.failure}")
        print(end="\n" if shown else "")


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
