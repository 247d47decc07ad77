"""The load generator: the same program puts every system under the same load."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent / "load"
LIMIT_SECONDS = 180.0  # for one slice


@cache
def program() -> Path:
    """Where it is; built if it is not, some minutes the first time."""
    cache = os.environ.get("NAMED_LOCKS_CACHE")
    target = Path(cache) / "load" if cache else PACKAGE / "target"
    build = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", str(PACKAGE / "Cargo.toml")]
    subprocess.run([*build, "--target-dir", str(target)], check=True)
    return target / "release" / "load"


def run(spec: dict[str, object]) -> dict[str, Any]:
    """Do what `Spec` in load/src/work.rs says, and return what `Report` in load/src/report.rs has."""
    command = [str(program()), json.dumps(spec)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"load: {spec['system']}, {spec['work']}: {done.stderr.strip()}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report
