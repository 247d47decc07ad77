"""Waiting for what should happen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0  # seconds: far more than anything takes, also on a busy machine

T = TypeVar("T")


def until(what: str, look: Callable[[], T | None], patience: float = PATIENCE) -> T:
    """Wait until there is something to see, and return it; an error if it takes longer than one has patience."""
    deadline = time.monotonic() + patience
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {patience:.0f} s: {what}"
        time.sleep(0.02)
    return seen
