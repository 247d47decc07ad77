"""The example programs of examples/clients: how each is built and started, and a process of one to talk with."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from polling import PATIENCE
from programs import Process

if TYPE_CHECKING:
    from server import Server

CLIENTS = Path(__file__).resolve().parent.parent / "examples" / "clients"
JDBC = Path("/usr/share/java/postgresql.jar")
LIB_PQ = Path("/usr/share/gocode/src/github.com/lib/pq")


class Built(NamedTuple):
    """A program ready to run: its command, and what its environment needs beside DATABASE_URL."""

    command: list[str]
    environment: dict[str, str]
    jdbc: bool = False

    def start(self, server: Server, name: str, *arguments: object) -> ClientProcess:
        """A process of it, known to the server by `name`."""
        address = f"127.0.0.1:{server.port}/demo"
        url = (
            f"jdbc:postgresql://{address}?user=demo&ApplicationName={name}"
            if self.jdbc
            else f"postgresql://demo@{address}?application_name={name}&sslmode=disable"
        )
        return ClientProcess([*self.command, *map(str, arguments)], {**self.environment, "DATABASE_URL": url})


class ClientProcess(Process):
    """A process that answers in lines of JSON and ends with its input."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=[self._process.stdout, self._answers.put]),
            threading.Thread(target=self._read, args=[self._process.stderr, self._errors.append]),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(lines: Any, keep: Callable[[str], None]) -> None:
        for line in lines:
            keep(line)
        keep("")

    def answer(self) -> dict[str, Any]:
        """Its next answer."""
        try:
            line = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            line = ""
        assert line, f"no answer: {''.join(self._errors)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str = "go on") -> None:
        """Give it a line of input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def end(self) -> int:
        """End its input; the exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.result()

    def close(self) -> None:
        """End it, whatever state it is in, and read no more from it."""
        super().close()
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def tool(name: str) -> str:
    """Where a program is; that there is none is an error."""
    found = shutil.which(name)
    assert found, f"there is no {name}: .ci/setup --field installs it"
    return found


def file(path: Path) -> Path:
    """A file or folder that has to be there."""
    assert path.exists(), f"there is no {path}: .ci/setup --field installs it"
    return path


def cache() -> Path:
    """Where .ci/setup puts what it fetches."""
    return Path(os.environ["NAMED_LOCKS_CACHE"])


def run(command: list[str], cwd: Path, **environment: str) -> None:
    """Run a compiler; what it says when it fails."""
    done = subprocess.run(
        command, cwd=cwd, check=False, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def build_node(folder: Path) -> Built:
    """Nothing to build; `pg` is where .ci/setup put it."""
    modules = file(cache() / "node" / "node_modules")
    return Built([tool("node"), str(CLIENTS / "node" / "demo.js")], {"NODE_PATH": str(modules)})


def build_java(folder: Path) -> Built:
    """Classes in `folder`, and the driver from its package."""
    sources = sorted(str(path) for path in (CLIENTS / "java").glob("*.java"))
    options = ["-Xlint:all", "-Werror", "--release", "17", "-cp", str(file(JDBC)), "-d", str(folder)]
    run([tool("javac"), *options, *sources], folder)
    # Short-lived processes: no second compiler, one thread for the garbage.
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]
    return Built([tool("java"), *quick, "-cp", f"{folder}:{JDBC}", "Demo"], {}, jdbc=True)


def build_go(folder: Path) -> Built:
    """With the driver from its package in place of the one that go would fetch."""
    modules = folder / "go.mod"
    replaced = f"\nreplace github.com/lib/pq => {file(LIB_PQ)}\n"
    modules.write_text((CLIENTS / "go" / "go.mod").read_text() + replaced)
    run(
        [tool("go"), "build", "-o", str(folder / "demo"), f"-modfile={modules}", "."],
        CLIENTS / "go",
        GOCACHE=str(cache() / "go"),
        GOPATH=str(folder / "path"),
        GOFLAGS="-mod=mod",
        GOPROXY="off",
        GOTOOLCHAIN="local",
    )
    return Built([str(folder / "demo")], {})


def build_rust(folder: Path) -> Built:
    """By cargo, which keeps what it built for the next time."""
    target = cache() / "target-examples"
    command = [tool("cargo"), "build", "--locked", "--quiet"]
    run(command, CLIENTS / "rust", CARGO_TARGET_DIR=str(target))
    return Built([str(target / "debug" / "named-locks-example")], {})


BUILD: dict[str, Callable[[Path], Built]] = {
    "node": build_node,
    "java": build_java,
    "go": build_go,
    "rust": build_rust,
}
