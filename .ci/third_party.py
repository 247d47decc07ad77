#!/usr/bin/env python3
"""Print what is linked into the library beside our own code: each crate with its authors and the text of its licence.

third-party FEATURE    of the build with that feature, such as pg15
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("licen", "copying", "copyright", "notice", "unlicense")


def linked(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the crates that become part of the library: no tools of the build, no macros, no tests."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    root = metadata["resolve"]["root"]
    found: set[str] = set()
    ahead = [root]
    while ahead:
        for dependency in nodes[ahead.pop()]["deps"]:
            package = packages[dependency["pkg"]]
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            is_macro = any("proc-macro" in target["kind"] for target in package["targets"])
            if is_linked and not is_macro and dependency["pkg"] not in found:
                found.add(dependency["pkg"])
                ahead.append(dependency["pkg"])
    return sorted((packages[name] for name in found), key=lambda package: (package["name"], package["version"]))


def main() -> int:
    """Print them."""
    host = next(
        line.split(": ")[1]
        for line in subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout.splitlines()
        if line.startswith("host: ")
    )
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    command += ["--no-default-features", "--features", sys.argv[1]]
    answer = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent
    )
    print("named_locks is linked with the following, each under a licence of its own.")
    for package in linked(json.loads(answer.stdout)):
        print(f"\n{'=' * 80}\n{package['name']} {package['version']}: {package['license'] or 'see below'}")
        if package["authors"]:
            print(f"by {', '.join(package['authors'])}")
        folder = Path(package["manifest_path"]).parent
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.name.lower().startswith(NAMES):
                print(f"\n--- {file.name}\n\n{file.read_text(encoding='utf-8', errors='replace').strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
