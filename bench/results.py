"""The results as files: all figures in JSON with the machine and the versions, a table in Markdown, and plots.

results.py FOLDER    make the table and the plots anew from FOLDER/results.json
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "examples"))  # for what servers.py imports

import plots
import servers
from table import Entry, Row, Section, head_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from server import Server

LOAD = os.getloadavg()[0]  # before anything is measured
FOLDER = Path(__file__).resolve().parent / "results"
DATA = "results.json"


def write(folder: Path, server: Server, sections: Sequence[Section]) -> None:
    """Write all files, over those of before."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command(),
        "machine": machine(),
        "versions": {**of_server(server), **servers.versions()},
        "sections": [
            {
                "part": section.name,
                "title": section.title,
                "failure": section.failure,
                "rows": [row._asdict() for row in section.rows],
            }
            for section in sections
        ],
    }
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")
    make(folder)


def make(folder: Path) -> None:
    """The table and the plots, from the JSON."""
    data = json.loads((folder / DATA).read_text())
    sections = [
        Section(section["title"], [row_of(row) for row in section["rows"]], section["failure"], section["part"])
        for section in data["sections"]
    ]
    names = plots.draw(folder, sections)
    (folder / "README.md").write_text("\n".join(markdown(data, sections, names)) + "\n")


def row_of(fields: dict[str, Any]) -> Row | Entry:
    """A line again."""
    return Entry(**fields) if "system" in fields else Row(**fields)


def command() -> str:
    """How one does the same."""
    arguments = " ".join(argument for argument in sys.argv[1:] if not argument.startswith("--results"))
    return f'make bench ARGS="{arguments}"' if arguments else "make bench"


def machine() -> dict[str, str]:
    """What it was measured on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "CPU": cpu.group(1) if cpu else platform.machine(),
        "CPUs": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load average before": f"{LOAD:.1f}",
    }


def of_server(server: Server) -> dict[str, str]:
    """The versions of the two that are ours."""
    with server.connect("bench") as conn:
        [(postgresql, extension)] = conn.execute(
            "SELECT current_setting('server_version'), extversion FROM pg_extension WHERE extname = 'named_locks'"
        )
    return {"named_locks": extension, "PostgreSQL": postgresql}


def markdown(data: dict[str, Any], sections: Sequence[Section], names: Sequence[str]) -> Iterator[str]:
    """The lines of README.md."""
    yield "# Results"
    yield ""
    yield f"Made by `{data['command']}` on {data['date']}; figures are medians, with the least and the most in brackets, and"
    yield "ratios are taken round by round. What is measured, and how: [bench/README.md](../README.md)."
    yield ""
    yield from table(("machine", ""), data["machine"].items())
    yield ""
    yield from table(("version", ""), data["versions"].items())
    for name in names:
        yield ""
        yield f"![{name}]({name}.svg)"
    for section in sections:
        yield ""
        yield f"## {section.title.partition(':')[0]}"
        yield ""
        yield section.title
        yield ""
        yield from table(head_of(section), [row.cells for row in section.rows])
        if section.failure:
            yield ""
            yield f"Not measured: {section.failure}"


def table(head: Sequence[str], rows: Any) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
