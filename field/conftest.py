"""What all tests in this folder may ask for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from programs import Programs, programs_in
from server import Server, throwaway_server
from views import held, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

# What tests have measured, by test.
_figures = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--long."""
    parser.addoption("--long", action="store_true", help="the long form: chaos for ten minutes")


def pytest_configure(config: pytest.Config) -> None:
    """A place for figures."""
    config.stash[_figures] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures."""
    for test, lines in config.stash[_figures].items():
        terminalreporter.section(test, sep="-")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Call it with a line to be shown under the test's name when all tests have run."""
    return request.config.stash[_figures].setdefault(request.node.name, []).append


@pytest.fixture(scope="session")
def bindir() -> Path:
    """The folder with initdb and postgres."""
    return Path(os.environ["NAMED_LOCKS_PG_BIN"])


@pytest.fixture(scope="session")
def runas() -> str | None:
    """The OS user to run servers as, if not ours."""
    return os.environ.get("NAMED_LOCKS_RUNAS") or None


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the long form is asked for."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="module")
def server(bindir: Path, runas: str | None) -> Iterator[Server]:
    """A server for the tests of a file, with the extension in its database `demo`."""
    with throwaway_server(bindir, runas) as server:
        yield server


@pytest.fixture
def other(server: Server) -> Iterator[psycopg.Connection]:
    """The session of somebody else, and nothing is held or waited for when a test has ended."""
    with server.connect("other") as other:
        yield other
        other.execute("SELECT named_unlock_all()")
        assert held(other) == []
        assert waiting(other) == 0


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Programs for a test."""
    with programs_in(tmp_path) as programs:
        yield programs
