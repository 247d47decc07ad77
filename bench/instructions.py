"""In the server, by count: the instructions of a free lock and back, and of leases, which come out the same each time."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Callable

import inside
from common import NAMED, NATIVE, Bench, BenchServer, Pairs, Side, bench_server, execute
from leases import ACQUIRE_BY_HAND, BY_HAND
from table import Row, Target, compared, stated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    Statements = Mapping[Side, str]
    Loop = Callable[[Side, str, int], str]

TARGET = Target("<=", 1.15)
UNIT = "instr/pair"
LEASE_UNIT = "instr"
LIMIT_SECONDS = 300.0  # for one session

# The form that is told apart.
DISSECTED = "DO loop: the name in a variable"
LOCKS = {
    DISSECTED: (inside.LOOP, inside.LOOP_NAMES["the name in a variable"]),
    "SELECT over a set: 1,000 names": (inside.SET_BASED, "lock_name"),
}
LEASE_LOOP = """
DO $$
DECLARE
    its_token bigint;
BEGIN
    {first}
    FOR i IN 1..{times} LOOP
        {statements}
    END LOOP;
    {last}
END
$$"""
ACQUIRE = {
    NATIVE: ACQUIRE_BY_HAND.format(name="'bench'") + " INTO its_token; COMMIT;",
    NAMED: "SELECT (lease_acquire('bench', '1 h', owner => 'bench')).token INTO its_token; COMMIT;",
}
RENEW = {
    NATIVE: """
UPDATE hand_lease SET expires_at = clock_timestamp() + '1 h'
WHERE name = 'bench' AND token = its_token AND expires_at >= clock_timestamp(); COMMIT;""",
    NAMED: "PERFORM (lease_renew('bench', its_token, '1 h')).expires_at; COMMIT;",
}
RELEASE = {
    NATIVE: "DELETE FROM hand_lease WHERE name = 'bench' AND token = its_token; COMMIT;",
    NAMED: "PERFORM lease_release('bench', its_token); COMMIT;",
}
NOTHING = {NATIVE: "", NAMED: ""}
# What is done before, how often, and after.
LEASES: dict[str, tuple[Statements, Statements, Statements]] = {
    "lease: renew (by hand: UPDATE), each with its COMMIT": (ACQUIRE, RENEW, RELEASE),
    "lease: acquire; release (by hand: INSERT ON CONFLICT; DELETE), each with its COMMIT": (
        NOTHING,
        {side: ACQUIRE[side] + RELEASE[side] for side in (NATIVE, NAMED)},
        NOTHING,
    ),
}
LEASES_FEWER = 10  # than locks, by so many times
# By what callgrind_annotate shows: these functions with all that they call, or what stands in these files and in none named
# before, wherever the compiler has put it. What they call in the C library is a part of the first line only.
PARTS = {
    "the functions called": r"(pg_advisory_(un)?lock_int8|hashtextextended|named_(un)?lock_wrapper)",
    "- the lock manager": r"(LockAcquireExtended|LockRelease)",
    "- native's key": r"hashtextextended",
    "- named: arguments, rules of the domain": (
        r"src/(api/\w+|server/(arguments|domains|encoding)|rules/(interval|mode|domain))\.rs"
    ),
    "- named: name and key": r"(src/rules/(name|key)|xxhash-rust-[\d.]+/src/\w+)\.rs",
    "- named: ledger of the session": r"src/rules/holds\.rs",
    "- named: registry": r"src/server/registry\.rs",
    "- named: statistics": r"src/server/statistics\.rs",
    "- named: traps for errors and panics": r"(src/server/try_block|cee-scape-[\d.]+/src/\w+|submodules/panic)\.rs",
    "- named: session, and what it asks the server": r"src/server/.*\.rs",
    "- named: Rust's library and the bindings": r"((rustc|deps)/.*|pgrx-.*)\.rs",
}
# How callgrind_annotate shows a function: its instructions, their share, and FILE:FUNCTION [LIBRARY].
LINE = re.compile(r"^ *(?P<count>[\d,]+) \([^)]*\)  (?P<file>[^ ]*?):(?P<function>[\w:<>]+)(?:'\d+)?")

Counts = dict[str, int]


def title(bench: Bench) -> str:
    """What is measured, and how."""
    pairs = bench.effort.counted_pairs
    return (
        f"Instructions in the server: a session of {2 * pairs:,} pairs less one of {pairs:,} (leases: a tenth of that), "
        f"by valgrind's callgrind; the parts are of '{DISSECTED}'"
    )


def measure(bench: Bench) -> Iterator[Row]:
    """Both forms of locks, then the parts of one, then leases."""
    for program in ("valgrind", "callgrind_annotate"):
        if shutil.which(program) is None:
            raise RuntimeError(f"there is no {program}: .ci/setup --bench installs it")
    pairs = bench.effort.counted_pairs
    with ExitStack() as stack:
        # A server for each side: what is counted does not depend on what else runs, so both are at it at once.
        servers = {side: stack.enter_context(stopped_server(bench)) for side in (NATIVE, NAMED)}
        threads = stack.enter_context(ThreadPoolExecutor())

        def both(loop: Loop, what: str, times: int) -> Sequence[dict[str, float]]:
            return list(threads.map(lambda side: of_each(servers[side], partial(loop, side, what), times), servers))

        seen = {what: both(lock_loop, what, pairs) for what in LOCKS}
        for what, (native, named) in seen.items():
            yield compared(what, UNIT, Pairs([native[""]], [named[""]]), TARGET)
        native, named = seen[DISSECTED]
        if not any(what.endswith("src/server/session/mod.rs") for what in named):
            raise RuntimeError(
                "the library has no line tables: build it with CARGO_PROFILE_RELEASE_DEBUG=line-tables-only"
            )
        yield from parts_of(native, named)
        for what in LEASES:
            native, named = both(lease_loop, what, pairs // LEASES_FEWER)
            yield compared(what, LEASE_UNIT, Pairs([native[""]], [named[""]]))


@contextmanager
def stopped_server(bench: Bench) -> Iterator[BenchServer]:
    """Has all that a session needs, and has read and made what is read and made once."""
    with bench_server(bench.server.bindir, bench.server.runas) as server:
        with closing(server.connect("bench instructions")) as conn:
            execute(conn, BY_HAND)
            execute(conn, lock_loop(NATIVE, DISSECTED, 1))
            execute(conn, lock_loop(NAMED, DISSECTED, 1))
        server.shut_down()
        yield server


def lock_loop(side: Side, what: str, pairs: int) -> str:
    """So many pairs in one statement."""
    form, name = LOCKS[what]
    return form.format(lock=side.lock.format(name), unlock=side.unlock.format(name), pairs=pairs)


def lease_loop(side: Side, what: str, times: int) -> str:
    """The same of leases."""
    first, statements, last = (part[side] for part in LEASES[what])
    return LEASE_LOOP.format(first=first, statements=statements, last=last, times=times)


def of_each(server: BenchServer, statement: Callable[[int], str], times: int) -> dict[str, float]:
    """What each time costs: of each function, each file and, under no name, of all. The session's start is left out."""
    once, twice = (counted(server, statement(many)) for many in (times, 2 * times))
    return {what: (count - once.get(what, 0)) / times for what, count in twice.items()}


def parts_of(native: Mapping[str, float], named: Mapping[str, float]) -> Iterator[Row]:
    """By functions, and by files of which the name ends so."""
    seen: set[str] = set()
    for part, pattern in PARTS.items():
        these = {what for what in {*native, *named} if what not in seen and re.fullmatch(rf"(.*/)?{pattern}", what)}
        seen |= {what for what in these if what.endswith(".rs")}
        yield stated(part, UNIT, *(sum(counts.get(what, 0) for what in these) for counts in (native, named)))


def counted(server: BenchServer, statement: str) -> Counts:
    """The instructions of a session that runs one statement."""
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
    """What callgrind has counted: of functions, with all that they call, of what stands in files, and of all."""
    counts: Counts = {}
    functions = annotation(out, "--inclusive=yes")
    for found in filter(None, map(LINE.match, functions)):
        # A function of which parts stand in other files has a line for each: the first one says it all.
        counts.setdefault(found["function"], number(found["count"]))
    for found in filter(None, map(LINE.match, annotation(out, "--inclusive=no"))):
        counts[found["file"]] = counts.get(found["file"], 0) + number(found["count"])
    counts[""] = next(number(line.split()[0]) for line in functions if "PROGRAM TOTALS" in line)
    return counts


def annotation(out: Path, inclusive: str) -> list[str]:
    """The lines that callgrind_annotate writes."""
    command = ["callgrind_annotate", inclusive, "--threshold=100", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if "PROGRAM TOTALS" not in done.stdout:
        raise RuntimeError(f"callgrind_annotate: {done.stdout[:500]}")
    return done.stdout.splitlines()


def number(text: str) -> int:
    """A number as callgrind_annotate writes it."""
    return int(text.replace(",", ""))
