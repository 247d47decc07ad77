"""Histories: what each process did and saw, line by line.

Each has a file of its own that only grows. What is about to be done is noted before it is sent, and each line is
written at once: what a process has noted outlives its SIGKILL.

A client notes these, all with `at` and `who`:

    open      session, route, pid (None where a pooler changes it)
    lost      session, sqlstate, text: the connection has ended, not by us
    error     session, sqlstate, text: a statement has failed
    try       attempt, session, form, names, mode, capacity, seconds (TTL or hold limit), bound: about to ask for it
    grant     attempt, resources, pid, token
    refuse    attempt: the answer was no
    fail      attempt, sqlstate, text: the answer was an error
    held      attempt, count: of the names asked for, so many are held
    saw       attempt, values: what was read at the beginning and at the end of a hold in share mode
    write     write, attempt, changes, token: about to begin writing
    guarded   write: the guard has let it through
    commit    write: about to commit
    written   write, outcome: acked, refused (by the guard), failed (never committed), unknown (no answer)
    renew     attempt; then `renewed` with outcome: acked, refused, unknown
    release   attempt, keep: about to give it back
    released  attempt, sqlstate, gave: there was an answer; of a lease, whether it was still held
    idle      attempt, locks: so many advisory locks the session has after it
    broke     text: the client itself has failed

The troublemaker notes what it does to whom, `at` the time before and `until` the time after (see trouble.py).
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]


def now() -> int:
    """The time in nanoseconds, by the clock that leases go by. It is the same for all processes of a machine."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class History:
    """The file of one process."""

    def __init__(self, folder: Path, who: str) -> None:
        self.who = who
        self._file = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, at: int | None = None, **facts: Any) -> None:
        """Add a line."""
        event = {"at": now() if at is None else at, "who": self.who, "what": what, **facts}
        os.write(self._file, json.dumps(event).encode() + b"\n")


def read_histories(folder: Path) -> list[Event]:
    """What all have noted, each one's lines in their order."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        # A line that was being written when its writer was killed has no end.
        events += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return events
