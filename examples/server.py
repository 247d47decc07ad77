"""A throw-away PostgreSQL server: made in a temporary folder, stopped and removed at the end."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Over the loopback address only the ordinary role comes in. The superuser needs the socket, whose folder is closed
# to other users of the machine.
HBA = """\
local  all   all                trust
host   demo  demo  127.0.0.1/32  trust
"""

START_SECONDS = 30.0
STOP_SECONDS = 10.0


S = TypeVar("S", bound="Server")


class ServerError(Exception):
    """The server could not be made or started; the text says why."""


class Server:
    """A server of its own in `folder`, with the extension in its database `demo`."""

    def __init__(self, bindir: Path, folder: Path, runas: str | None = None) -> None:
        self.bindir = bindir
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "server.log"
        self.runas = runas
        self.port = 0
        self.keep = False  # leave it running at the end
        self._process: subprocess.Popen[Any] | None = None

    @property
    def conninfo(self) -> str:
        """Where a client connects, as an ordinary role."""
        return f"host=127.0.0.1 port={self.port} user=demo dbname=demo"

    @property
    def psql_line(self) -> str:
        """The command that joins in by psql."""
        return f"{shlex.quote(str(self.bindir / 'psql'))} -h 127.0.0.1 -p {self.port} -U demo demo"

    @property
    def stop_line(self) -> str:
        """The command that stops the server and removes its data."""
        pg_ctl = f"{shlex.quote(str(self.bindir / 'pg_ctl'))} -D {self.data} -m fast stop"
        as_user = f"env -C / runuser -u {shlex.quote(self.runas)} -- " if self.runas else ""
        return f"{as_user}{pg_ctl} && rm -r {self.folder}"

    def connect(self, application_name: str) -> psycopg.Connection:
        """A new session."""
        return psycopg.connect(self.conninfo, application_name=application_name, autocommit=True)

    def log_tail(self, lines: int = 20) -> str:
        """The end of the server's log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def create(self) -> None:
        """Make the data directory."""
        self.folder.chmod(0o700)
        if self.runas:
            shutil.chown(self.folder, self.runas)
        initdb = [str(self.bindir / "initdb"), "-D", str(self.data)]
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(initdb + options, check=False, capture_output=True, text=True, **self.as_user())
        if done.returncode != 0:
            raise ServerError(f"initdb failed:\n{done.stderr.strip()}")
        (self.data / "pg_hba.conf").write_text(HBA)

    def start(self) -> None:
        """Start it, and wait until it answers. A port can be taken from under us: then another is tried."""
        for _ in range(3):
            self.port = free_port()
            if self.start_again():
                return
        raise ServerError(f"the server did not start:\n{self.log_tail()}")

    def start_again(self) -> bool:
        """Start it on the port that it has, and wait until it answers; whether it does."""
        postgres = [str(self.bindir / "postgres"), "-D", str(self.data)]
        options = ["-k", str(self.folder), "-h", "127.0.0.1", "-p", str(self.port)]
        with self.log.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal is for us, and we stop the server.
            self._process = subprocess.Popen(
                postgres + options,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self.as_user(),
            )
        return self._wait_until_up()

    def prepare(self) -> None:
        """The ordinary role, its database, and the extension in it."""
        with self.superuser("postgres") as conn:
            conn.execute("CREATE ROLE demo LOGIN")
            conn.execute("CREATE DATABASE demo OWNER demo")
        with self.superuser("demo") as conn:
            try:
                conn.execute("CREATE EXTENSION named_locks")
            except psycopg.Error as error:
                raise ServerError(f"CREATE EXTENSION named_locks: {error}") from error

    def end(self, number: signal.Signals) -> None:
        """Send the postmaster a signal that ends it, and wait for its end."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(START_SECONDS)

    def stop(self) -> None:
        """Stop it (fast, then harder) and remove all it has written."""
        for stop_signal in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if self._process is None or self._process.poll() is not None:
                break
            self._process.send_signal(stop_signal)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def superuser(self, database: str = "demo") -> psycopg.Connection:
        """A new session of the superuser."""
        return psycopg.connect(host=str(self.folder), port=self.port, user="postgres", dbname=database, autocommit=True)

    def _wait_until_up(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            try:
                self.superuser("postgres").close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.02)
        return False

    def as_user(self) -> dict[str, Any]:
        """What subprocess needs to run a program as the server's OS user."""
        return as_user(self.runas, self.folder)


@contextmanager
def throwaway_server(
    bindir: Path,
    runas: str | None = None,
    make: Callable[[Path, Path, str | None], S] = Server,
) -> Iterator[S]:
    """Run a server for the block, as the OS user `runas` if one is given; `make` gives one of a more special kind.

    It is gone afterwards, also after an error or a Ctrl-C, unless the block has set `keep` and ended well.
    """
    check_user(runas)
    # Not $TMPDIR: a socket's path may have 107 bytes only, and `runas` has to get there.
    server = make(bindir, Path(tempfile.mkdtemp(prefix="named_locks-", dir="/tmp")), runas)
    try:
        server.create()
        server.start()
        server.prepare()
        yield server
    except BaseException:
        server.keep = False
        raise
    finally:
        if not server.keep:
            with no_interrupts():
                server.stop()


def as_user(runas: str | None, folder: Path) -> dict[str, Any]:
    """What subprocess needs to run a program as an OS user, if one is given, from a folder that user may enter."""
    if runas is None:
        return {"cwd": folder}
    user = pwd.getpwnam(runas)
    return {"cwd": folder, "user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def check_user(runas: str | None) -> None:
    """PostgreSQL refuses to run as root, and only root can run it as somebody else."""
    if os.geteuid() != 0:
        if runas and pwd.getpwnam(runas).pw_uid != os.geteuid():
            raise ServerError(f"only root can run a server as {runas}")
    elif not runas or pwd.getpwnam(runas).pw_uid == 0:
        raise ServerError("PostgreSQL does not run as root: name another OS user in NAMED_LOCKS_RUNAS")


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore a second Ctrl-C, which would leave half of the cleaning up undone."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
