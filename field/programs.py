"""Programs that a test runs beside itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from polling import PATIENCE
from server import no_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class Process:
    """A process with a process group of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            command, env={**os.environ, **env}, start_new_session=True, **options
        )

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    def result(self) -> int:
        """Its exit code, when it has ended."""
        return self._process.wait(PATIENCE)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it, with its children, whatever state it is in."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Program(Process):
    """A Python program; what it prints goes to a file."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("ab") as log:
            super().__init__(
                [sys.executable, *arguments],
                {"PYTHONDONTWRITEBYTECODE": "1", "PGAPPNAME": name, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")


class Programs:
    """Programs that are gone when the test has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Program] = []

    def start(self, name: str, *arguments: str, **env: str) -> Program:
        """Start Python with these arguments; `name` is its application_name too."""
        program = Program(name, arguments, self._folder, env)
        self._all.append(program)
        return program

    def close(self) -> None:
        """End all, and show what they have said, should the test have failed."""
        with no_interrupts():
            for program in self._all:
                program.close()
        for program in self._all:
            print(f"--- {program.name}\n{program.output}")


@contextmanager
def programs_in(folder: Path) -> Iterator[Programs]:
    """Programs for the block."""
    programs = Programs(folder)
    try:
        yield programs
    finally:
        programs.close()
