"""The plots: a figure for each part measured side by side, a panel for each case."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from table import Entry, Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.2, 3.7  # of a panel, inches
ACROSS = 3  # panels
# The same colour for the same kind of system in all plots: ours, what PostgreSQL has, others.
COLOURS = {
    "named": "#d62728",
    "lease": "#d62728",
    "lock_holders": "#d62728",
    "native": "#1f77b4",
    "pg_locks": "#1f77b4",
    "SQL by hand, release": "#9ecae1",
    "SQL by hand": "#1f77b4",
    "PostgreSQL's": "#c7c7c7",
    "polling": "#7f7f7f",
    "MariaDB": "#2ca02c",
    "Redis": "#ff7f0e",
    "etcd": "#9467bd",
}


def check() -> None:
    """Fail where nothing can be drawn, before minutes are spent on measuring it."""
    import matplotlib  # noqa: F401


def draw(folder: Path, sections: Sequence[Section]) -> list[str]:
    """Draw SVG and PNG files, over those of before, and return their names."""
    # Only here: who measures one part only, or prints only, does without.
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "named_locks", "font.size": 9})
    from matplotlib import pyplot

    names = []
    for section in sections:
        panels = list(panels_of(section))
        if not panels:
            continue
        across = min(ACROSS, len(panels))
        down = -(-len(panels) // across)
        figure, grid = pyplot.subplots(
            down, across, figsize=(WIDTH * across, HEIGHT * down), squeeze=False, layout="constrained"
        )
        for axes, entries in zip(grid.flat, panels):
            panel(axes, entries)
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        figure.suptitle(section.title.partition(":")[0], fontsize=12)
        figure.savefig(folder / f"{section.name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{section.name}.png", dpi=110, metadata={"Software": None})
        pyplot.close(figure)
        names.append(section.name)
    return names


def panels_of(section: Section) -> Iterator[list[Entry]]:
    """The entries of each case."""
    cases: dict[str, list[Entry]] = {}
    for row in section.rows:
        if isinstance(row, Entry):
            cases.setdefault(row.case, []).append(row)
    yield from cases.values()


def panel(axes: Axes, entries: Sequence[Entry]) -> None:
    """Bars where there are few points, lines where there is a curve."""
    curves: dict[str, list[Entry]] = {}
    for entry in entries:
        curves.setdefault(entry.system, []).append(entry)
    points = sorted({entry.x for entry in entries})
    if len(points) > ACROSS:
        for system, curve in curves.items():
            xs, heights = [entry.x for entry in curve], [statistics.median(entry.figures) for entry in curve]
            axes.errorbar(
                xs, heights, spread(curve), label=system, marker="o", markersize=4, capsize=3, color=colour(system)
            )
        axes.set_xscale("log", base=2 if points[-1] <= 64 else 10)
        axes.set_xticks(points, [brief(point) for point in points])
        axes.minorticks_off()
    else:
        width = 0.85 / len(curves)
        for at, (system, curve) in enumerate(curves.items()):
            xs = [points.index(entry.x) + (at - (len(curves) - 1) / 2) * width for entry in curve]
            heights = [statistics.median(entry.figures) for entry in curve]
            axes.bar(xs, heights, width, yerr=spread(curve), label=system, capsize=2, color=colour(system))
        axes.set_xticks(range(len(points)), [brief(point) for point in points])
    most = max(max(entry.figures) for entry in entries)
    least = min(min(entry.figures) for entry in entries)
    if least > 0 and most / least > 50:
        axes.set_yscale("log")
    elif least >= 0:
        axes.set_ylim(bottom=0)
    axes.set_title(entries[0].case, fontsize=10)
    axes.set_xlabel(entries[0].axis)
    axes.set_ylabel(entries[0].unit)
    axes.grid(axis="y", alpha=0.3)
    columns = 2 if max(len(system) for system in curves) > 15 else 3
    axes.legend(fontsize=7, ncols=columns, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def brief(number: int) -> str:
    """With k for thousands and M for millions."""
    for unit, many in (("M", 10**6), ("k", 10**3)):
        if number >= many:
            return f"{number / many:g}{unit}"
    return str(number)


def spread(curve: Sequence[Entry]) -> list[list[float]]:
    """From the least to the most, as lengths below and above the median."""
    medians = [statistics.median(entry.figures) for entry in curve]
    return [
        [median - min(entry.figures) for median, entry in zip(medians, curve)],
        [max(entry.figures) - median for median, entry in zip(medians, curve)],
    ]


def colour(system: str) -> str | None:
    """By what the system's name begins with."""
    return next((COLOURS[name] for name in COLOURS if system.startswith(name)), None)
