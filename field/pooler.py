"""A PgBouncer before a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from polling import until
from server import STOP_SECONDS, Server, as_user, free_port, no_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator

# All come in as the ordinary role.
INI = """\
[databases]
demo = host=127.0.0.1 port={server.port} user=demo
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
"""


class Pooler:
    """A PgBouncer of its own in `folder`."""

    def __init__(self, server: Server, folder: Path, mode: str, size: int) -> None:
        self.port = free_port()
        self._folder = folder
        self._runas = server.runas
        if server.runas:
            shutil.chown(folder, server.runas)
        (folder / "ini").write_text(INI.format(server=server, port=self.port, mode=mode, size=size))
        (folder / "ini").chmod(0o644)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def conninfo(self) -> str:
        """Where a client connects."""
        return f"host=127.0.0.1 port={self.port} user=demo dbname=demo"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        assert program, "there is no pgbouncer"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "ini"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **as_user(self._runas, self._folder),
            )
        until("the pooler answers", self._answers)

    def stop(self) -> None:
        """Stop it at once; its clients' connections are gone."""
        if self._process is not None:
            self._process.kill()  # what SIGTERM does depends on its version
            self._process.wait(STOP_SECONDS)
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def pooler(server: Server, mode: str, size: int = 2) -> Iterator[Pooler]:
    """Run a PgBouncer for the block. `mode`: session, transaction or statement; `size`: how many sessions it opens."""
    folder = Path(tempfile.mkdtemp(prefix="named_locks-", dir="/tmp"))
    pooler = Pooler(server, folder, mode, size)
    try:
        pooler.start()
        yield pooler
    finally:
        with no_interrupts():
            pooler.stop()
            shutil.rmtree(folder, ignore_errors=True)
