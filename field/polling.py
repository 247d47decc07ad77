"""Waiting for what should happen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0  # seconds: far more than anything takes, also on a busy machine


def until(what: str, holds: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until something is so; an error if it takes longer than one has patience."""
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, f"not within {patience:.0f} s: {what}"
        time.sleep(0.02)
