"""The other systems' servers: MariaDB, Redis and etcd, each in a temporary folder, stopped and removed at the end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from server import ServerError, as_user, check_user, free_port, no_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_SECONDS = 60.0
STOP_SECONDS = 10.0
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))

MARIADB_USER = "CREATE USER bench@'127.0.0.1';\n"


class Process:
    """A server's process, of the OS user `runas` if one is given."""

    def __init__(self, program: str, folder: Path, runas: str | None) -> None:
        found = shutil.which(program, path=PATH)
        if found is None:
            raise ServerError(f"there is no {program}: .ci/setup --bench installs it")
        self.program = found
        self.folder = folder
        self.log = folder / "server.log"
        self.port = 0
        self._runas = runas
        self._process: subprocess.Popen[Any] | None = None
        folder.mkdir()
        if runas:
            shutil.chown(folder, runas)

    def start(self, options: Sequence[str]) -> None:
        """Start it, and wait until it listens at its port."""
        with self.log.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal is for us, and we stop it.
            self._process = subprocess.Popen(
                [self.program, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self.as_user(),
            )
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise ServerError(f"{self.program} did not start:\n{tail}")

    def stop(self) -> None:
        """Stop it, then harder."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process is None or self._process.poll() is not None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue

    def as_user(self) -> dict[str, Any]:
        """What subprocess needs to run a program as that user, from a folder that it may enter."""
        environment = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": str(self.folder)}
        return {**as_user(self._runas, self.folder), "env": environment}


@contextmanager
def other_servers(runas: str | None, *names: str) -> Iterator[dict[str, str]]:
    """Run these of `OTHERS` for the block; where the load generator finds each."""
    check_user(runas)
    root = Path(tempfile.mkdtemp(prefix="named_locks-", dir="/tmp"))
    root.chmod(0o755)  # others have to get to their folders below
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        addresses = {}
        for name in names:
            other = OTHERS[name]
            process = Process(other.program, root / name.replace(" ", "-"), runas)
            stack.callback(stop_in_peace, process)
            process.port = free_port()
            other.start(process)
            addresses[name] = other.address.format(process.port)
        yield addresses


def versions() -> dict[str, str]:
    """What version each is of, as far as it is here."""
    said = {}
    for program, pattern in VERSIONS.items():
        found = shutil.which(program, path=PATH)
        if found:
            done = subprocess.run([found, "--version"], check=False, capture_output=True, text=True)
            match = re.search(pattern, done.stdout)
            said[program] = match.group(1) if match else done.stdout.strip()
    return said


def stop_in_peace(process: Process) -> None:
    """A second Ctrl-C would leave it running."""
    with no_interrupts():
        process.stop()


def start_mariadb(process: Process) -> None:
    """As it comes, with an empty database."""
    data, users = process.folder / "data", process.folder / "users.sql"
    users.write_text(MARIADB_USER)
    made = subprocess.run(
        ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db"],
        check=False,
        capture_output=True,
        text=True,
        **process.as_user(),
    )
    if made.returncode != 0:
        raise ServerError(f"mariadb-install-db failed:\n{made.stdout}{made.stderr}")
    process.start(
        [
            "--no-defaults",
            f"--datadir={data}",
            f"--socket={process.folder}/socket",
            f"--pid-file={process.folder}/pid",
            f"--port={process.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            f"--init-file={users}",
        ]
    )


def start_redis(process: Process, durable: bool = False) -> None:
    """Either every write is on the disk before its answer, or none ever."""
    here = ["--bind", "127.0.0.1", "--port", str(process.port), "--dir", str(process.folder)]
    process.start([*here, "--save", "", "--appendonly", "yes" if durable else "no", "--appendfsync", "always"])


def start_etcd(process: Process) -> None:
    """One member alone: no other has to agree."""
    client, peer = f"http://127.0.0.1:{process.port}", f"http://127.0.0.1:{free_port()}"
    process.start(
        [
            f"--data-dir={process.folder}/data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]
    )


class Other(NamedTuple):
    """How one of them is started, and found at its port."""

    program: str
    address: str
    start: Callable[[Process], None]


OTHERS = {
    "mariadb": Other("mariadbd", "mysql://bench@127.0.0.1:{}/?prefer_socket=false", start_mariadb),
    "redis": Other("redis-server", "redis://127.0.0.1:{}", start_redis),
    "redis durable": Other("redis-server", "redis://127.0.0.1:{}", partial(start_redis, durable=True)),
    "etcd": Other("etcd", "127.0.0.1:{}", start_etcd),
}
VERSIONS = {"mariadbd": r"Ver ([^ ]+)", "redis-server": r"v=([^ ]+)", "etcd": r"Version: ([^ \n]+)"}
