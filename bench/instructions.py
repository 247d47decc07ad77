"""In the server, by count: the instructions of a free lock and back, which come out the same each time."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import inside
from common import NAMED, NATIVE, Bench, BenchServer, Pairs, Side, bench_server
from table import Row, Target, compared, stated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TARGET = Target("<=", 1.15)
UNIT = "instr/pair"
LIMIT_SECONDS = 300.0  # for one session

# The form that is told apart.
DISSECTED = "DO loop: the name in a variable"
FORMS = {
    DISSECTED: (inside.LOOP, inside.LOOP_NAMES["the name in a variable"]),
    "SELECT over a set: 1,000 names": (inside.SET_BASED, "lock_name"),
}
# By these functions; what they call is counted with them. One that the compiler has put into its caller isn't shown.
PARTS = {
    "the functions called": r"(pg_advisory_(un)?lock_int8|hashtextextended|named_(un)?lock_wrapper)",
    "- the lock manager": r"(LockAcquireExtended|LockRelease)",
    "- arguments, name and key": r"(hashtextextended|named_locks::api::arguments::named)",
    "- rules of the domain, in that": r"named_locks::api::arguments::by_rule",
    "- entering the session": r"named_locks::server::session::Session::enter",
    "- registry": r"named_locks::server::session::Session::(publish_at|after_change)",
    "- statistics": r"named_locks::server::session::Lock::count_grant",
    "- ledger of the session": r"named_locks::rules::holds::Ledger::(add|remove)",
}
# How callgrind_annotate shows a function: its instructions, their share, and FILE:FUNCTION [LIBRARY].
FUNCTION = re.compile(r"^ *([\d,]+) \([^)]*\)  [^ ]*?:([\w:<>]+)(?:'\d+)? \[")

Counts = dict[str, int]


def title(bench: Bench) -> str:
    """What is measured, and how."""
    pairs = bench.effort.counted_pairs
    return (
        f"Instructions in the server: a session of {2 * pairs:,} pairs less one of {pairs:,}, by valgrind's callgrind; "
        f"the parts are of '{DISSECTED}'"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Both forms, then the parts of one."""
    for program in ("valgrind", "callgrind_annotate"):
        if shutil.which(program) is None:
            raise RuntimeError(f"there is no {program}: .ci/setup --bench installs it")
    with bench_server(bench.server.bindir, bench.server.runas) as server:
        server.shut_down()
        for side in (NATIVE, NAMED):
            counted(server, side, DISSECTED, 1)  # what is read and made once
        seen = {what: [of_pair(bench, server, side, what) for side in (NATIVE, NAMED)] for what in FORMS}
    for what, (native, named) in seen.items():
        yield compared(what, UNIT, Pairs([native[""]], [named[""]]), TARGET)
    for part, pattern in PARTS.items():
        native, named = (
            sum(count for function, count in counts.items() if re.fullmatch(pattern, function))
            for counts in seen[DISSECTED]
        )
        yield stated(part, UNIT, native, named)


def of_pair(bench: Bench, server: BenchServer, side: Side, what: str) -> dict[str, float]:
    """Of each function and, under no name, of all: what a pair costs. What a session's start costs is left out."""
    pairs = bench.effort.counted_pairs
    once, twice = (counted(server, side, what, times * pairs) for times in (1, 2))
    return {function: (count - once.get(function, 0)) / pairs for function, count in twice.items()}


def counted(server: BenchServer, side: Side, what: str, pairs: int) -> Counts:
    """The instructions of a session that runs so many pairs in one statement."""
    form, name = FORMS[what]
    statement = form.format(lock=side.lock.format(name), unlock=side.unlock.format(name), pairs=pairs)
    out = server.folder / "callgrind.out"
    valgrind = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}"]
    postgres = [str(server.bindir / "postgres"), "--single", "-D", str(server.data), "-c", "jit=off", "demo"]
    done = subprocess.run(
        [*valgrind, *postgres],
        input=" ".join(statement.split()) + "\n",
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        **server.as_user(),
    )
    if done.returncode != 0 or "ERROR" in done.stderr:
        raise RuntimeError(f"callgrind: {done.stderr.strip()}")
    return annotated(out)


def annotated(out: Path) -> Counts:
    """What callgrind has counted."""
    command = ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    total = re.search(r"^ *([\d,]+) .*PROGRAM TOTALS", done.stdout, re.MULTILINE)
    if total is None:
        raise RuntimeError(f"callgrind_annotate: {done.stdout[:500]}")
    counts = {"": int(total.group(1).replace(",", ""))}
    for line in done.stdout.splitlines():
        found = FUNCTION.match(line)
        if found:
            counts[found.group(2)] = int(found.group(1).replace(",", ""))
    return counts
