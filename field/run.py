"""Test named_locks with the parts that it is used with: poolers, frameworks, failover, chaos.

    run.py [--long] [PYTEST'S ARGUMENT ...]    for example: -k patroni

--long                chaos for ten minutes instead of one
NAMED_LOCKS_PG_BIN    the folder with initdb and postgres, of a server in which the extension is installed
NAMED_LOCKS_RUNAS     for root only: the OS user to run servers as
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest


def main() -> int:
    """Pytest's exit code; 2 where there is no server to test with."""
    if not os.environ.get("NAMED_LOCKS_PG_BIN"):
        print("NAMED_LOCKS_PG_BIN has to name the folder with initdb and postgres", file=sys.stderr)
        return 2
    for variable in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[variable]  # meant for another server
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # ends the run through the cleaning up
    return int(pytest.main(["-p", "no:cacheprovider", str(Path(__file__).parent), *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
