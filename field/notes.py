"""What clients did, noted by themselves, and what must be true of it.

All times are of the monotonic clock, which is one for all processes of a machine.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class Note(NamedTuple):
    """Something that happened to a client, and when it knew."""

    at: float
    client: str
    what: str
    details: dict[str, Any]


class Notes:
    """The notes of one client, in a file: they are there also if it is killed."""

    def __init__(self, folder: Path, client: str) -> None:
        self._client = client
        self._file = (folder / f"{client}.notes").open("a", buffering=1)  # a line at a time

    def add(self, what: str, **details: Any) -> None:
        """Note something."""
        self._file.write(json.dumps([time.monotonic(), self._client, what, details]) + "\n")


def read(folder: Path) -> list[Note]:
    """All notes of all clients so far, in the order of time."""
    lines = [line for file in folder.glob("*.notes") for line in file.read_text().splitlines(keepends=True)]
    return sorted(Note(*json.loads(line)) for line in lines if line.endswith("\n"))


class Grant(NamedTuple):
    """A lease that a client was granted, between its question and the answer."""

    asked: float
    answered: float
    client: str
    name: str
    token: int
    server: int


def not_rising(grants: Iterable[Grant]) -> list[tuple[Grant, Grant]]:
    """Pairs that contradict the contract: the second was asked for when the first had been answered, or has the same
    token, and does not have the higher one."""
    answered = sorted(grants, key=lambda grant: grant.answered)
    wrong = []
    highest: Grant | None = None
    known = 0
    for grant in sorted(answered):
        while answered[known].answered < grant.asked:
            if highest is None or answered[known].token > highest.token:
                highest = answered[known]
            known += 1
        if highest is not None and grant.token <= highest.token:
            wrong.append((highest, grant))
    by_token = sorted(answered, key=lambda grant: grant.token)
    wrong += [pair for pair in zip(by_token, by_token[1:]) if pair[0].token == pair[1].token]
    return wrong


class Span(NamedTuple):
    """The time in which a client took itself for the holder."""

    start: float
    end: float
    client: str
    server: int = 0


def overlaps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Pairs of which the second began before the first had ended."""
    found = []
    last: Span | None = None  # to end
    for span in sorted(spans):
        if last is not None and span.start < last.end:
            found.append((last, span))
        if last is None or span.end > last.end:
            last = span
    return found
