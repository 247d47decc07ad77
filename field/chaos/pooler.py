"""A PgBouncer before a server, in session and in transaction mode."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import psycopg

from server import free_port

if TYPE_CHECKING:
    import signal
    from pathlib import Path

    from server import Server

PROGRAM = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
START_SECONDS = 15.0
STOP_SECONDS = 10.0

INI = """\
[databases]
session = host=127.0.0.1 port={server_port} dbname=demo pool_mode=session
transaction = host=127.0.0.1 port={server_port} dbname=demo pool_mode=transaction pool_size={transaction_pool}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
default_pool_size = 20
; After a crash of the server: soon.
server_login_retry = 1
"""


class Pooler:
    """It is stopped, and all of it gone, at the end of the block."""

    def __init__(self, server: Server, folder: Path, transaction_pool: int) -> None:
        self.port = free_port()
        self._server = server
        self._folder = folder
        self._process: subprocess.Popen[Any] | None = None
        (folder / "users").write_text('"demo" ""\n')
        settings = {"port": self.port, "server_port": server.port, "folder": folder}
        (folder / "ini").write_text(INI.format(transaction_pool=transaction_pool, **settings))
        folder.chmod(0o755)

    def conninfo(self, mode: str) -> str:
        """Where a client connects."""
        return f"host=127.0.0.1 port={self.port} user=demo dbname={mode}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        user = {"user": pwd.getpwnam(self._server.runas).pw_uid} if self._server.runas else {}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "-q", str(self._folder / "ini")],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **user,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.conninfo("session"), connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.02)

    def stop(self, signal_number: signal.Signals) -> None:
        """End it, and wait for its end."""
        assert self._process is not None
        self._process.send_signal(signal_number)
        self._process.wait(STOP_SECONDS)

    def close(self) -> None:
        """End it by force."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
