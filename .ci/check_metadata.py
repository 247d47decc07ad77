#!/usr/bin/env python3
"""Check what is said about the release in more than one place: META.json is as PGXN wants it, and META.json, the control
file, CHANGELOG.md, Dockerfile and Cargo.toml, which has the last word, agree. It needs pgxn_meta on the PATH.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    """Return the text of a file of the checkout."""
    return (CHECKOUT / name).read_text(encoding="utf-8")


def output(*command: str) -> str:
    """Return what a command prints; it is told what went wrong if it fails."""
    done = subprocess.run(command, check=False, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Findings(list[str]):
    """What is wrong, a line each."""

    def that(self, is_so: bool, finding: str) -> None:
        """Note it unless it is so."""
        if not is_so:
            self.append(finding)


def check_meta(found: Findings, crate: dict[str, Any]) -> None:
    """META.json against Cargo.toml and the files it names."""
    output("pgxn_meta", "META.json")
    meta = json.loads(text("META.json"))
    version = crate["version"]
    found.that(meta["version"] == version, f"META.json is of version {meta['version']}, Cargo.toml of {version}")
    # By semantic versioning, what is before 1.0 or has a suffix is no stable release.
    status = "stable" if re.fullmatch(r"[1-9]\d*\.\d+\.\d+", version) else "unstable"
    found.that(meta["release_status"] == status, f"META.json: version {version} is {status}")
    for name, extension in meta["provides"].items():
        found.that(extension["version"] == version, f"META.json: {name} is of version {extension['version']}")
        for key in ("file", "docfile"):
            found.that((CHECKOUT / extension[key]).is_file(), f"META.json: there is no {extension[key]}")
    oldest = min(int(feature[2:]) for feature in crate["features"] if re.fullmatch(r"pg\d+", feature))
    required = meta["prereqs"]["runtime"]["requires"]["PostgreSQL"]
    found.that(required == f"{oldest}.0.0", f"META.json wants PostgreSQL {required}, Cargo.toml {oldest}")


def check_texts(found: Findings, crate: dict[str, Any]) -> None:
    """The control file, the changelog and the licence."""
    version = crate["version"]
    # cargo-pgrx puts the version of Cargo.toml there.
    found.that("default_version = '@CARGO_VERSION@'" in text("named_locks.control"), "the control file has a version")
    newest = re.search(r"^## \[(.+?)\] - (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    if newest is None:
        found.append("CHANGELOG.md has no version")
    elif newest[1] == "Unreleased":
        found.that(newest[2] == version, f"CHANGELOG.md prepares {newest[2]}, Cargo.toml {version}")
    else:
        found.that(newest[1] == version, f"CHANGELOG.md has {newest[1]} at its top, Cargo.toml {version}")
        found.that(bool(re.fullmatch(r"\d{4}-\d\d-\d\d", newest[2])), f"CHANGELOG.md: {newest[2]} is not a date")
    licence, debian = text("LICENSE").split("\n\n", 2)[2], text("debian/copyright")
    found.that(
        " ".join(licence.split()) in " ".join(debian.replace("\n .\n", "\n").split()),
        "debian/copyright has another licence than LICENSE",
    )


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments, lines that are continued joined."""
    lines = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def check_docker(found: Findings, crate: dict[str, Any]) -> None:
    """The Dockerfile against the checkout; its form is hadolint's business."""
    steps = instructions(text("Dockerfile"))
    defaults = dict(rest.split("=", 1) for word, rest in steps if word == "ARG" and "=" in rest)
    rust = [int(part) for part in defaults["RUST"].split(".")]
    needed = [int(part) for part in crate["rust_version"].split(".")]
    found.that(rust >= needed, f"the Dockerfile's Rust is {defaults['RUST']}, Cargo.toml wants {crate['rust_version']}")
    found.that(
        f"pg{defaults['PG_MAJOR']}" in crate["features"], f"the Dockerfile's PostgreSQL is {defaults['PG_MAJOR']}"
    )
    kept = [line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")]
    for name in kept:
        found.that((CHECKOUT / name).exists(), f".dockerignore: there is no {name}")
    for word, rest in steps:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                found.that(source == "." or source in kept, f"Dockerfile: .dockerignore leaves out {source}")


def main() -> int:
    """Exit code 0: all agrees."""
    crate = json.loads(output("cargo", "metadata", "--no-deps", "--format-version", "1"))["packages"][0]
    found = Findings()
    check_meta(found, crate)
    check_texts(found, crate)
    check_docker(found, crate)
    for finding in found:
        print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
