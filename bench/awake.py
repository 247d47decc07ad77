"""Keep the CPUs awake while they are measured.

A virtual machine gives an idle CPU back to its host, and waits for it again: a request and its answer then take six times
as long as on a busy machine, or not, as it happens. On each CPU a process of the lowest priority (SCHED_IDLE) keeps it
running: it yields at once to whoever has something to do, and is the same for all who are measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ends with its parent, whatever ends that.
SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """For the block."""
    with ExitStack() as stack:
        for cpu in os.sched_getaffinity(0):
            spinner = subprocess.Popen([sys.executable, "-c", SPIN, str(cpu), str(os.getpid())])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        yield
