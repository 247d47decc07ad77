"""A primary and a standby that streams from it."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from polling import until
from server import Server, ServerError, throwaway_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STANDBY = "standby"


class Node(Server):
    """A server that others may stream from."""

    def create(self) -> None:
        """Make the data directory."""
        super().create()
        with (self.data / "pg_hba.conf").open("a") as hba:
            hba.write("local  replication  all  trust\n")
        # The operating system does not crash here: what was written is there after any crash of a server.
        self.configure("fsync = off")

    def configure(self, line: str) -> None:
        """Add a line of configuration, for the next start."""
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write(f"{line}\n")

    def set(self, setting: str, value: str) -> None:
        """Change a setting of the running server."""
        with self.superuser() as conn:
            conn.execute(psycopg.sql.SQL("ALTER SYSTEM SET {} = {}").format(psycopg.sql.Identifier(setting), value))
            conn.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Make the standby a primary."""
        with self.superuser() as conn:
            assert conn.execute("SELECT pg_promote()").fetchone() == (True,)


class Standby(Node):
    """One that begins as a copy of another and follows it."""

    def __init__(self, primary: Server, bindir: Path, folder: Path, runas: str | None = None) -> None:
        super().__init__(bindir, folder, runas)
        self._primary = primary

    def create(self) -> None:
        """Make the data directory."""
        self.folder.chmod(0o700)
        if self.runas:
            shutil.chown(self.folder, self.runas)
        source = f"host={self._primary.folder} port={self._primary.port} user=postgres application_name={STANDBY}"
        pg_basebackup = [str(self.bindir / "pg_basebackup"), "-d", source, "-D", str(self.data)]
        options = ["-R", "-X", "stream", "-c", "fast", "--no-sync"]
        done = subprocess.run(pg_basebackup + options, check=False, capture_output=True, text=True, **self.as_user())
        if done.returncode != 0:
            raise ServerError(f"pg_basebackup failed:\n{done.stderr.strip()}")

    def prepare(self) -> None:
        """All is there, from the primary."""


class Pair:
    """A primary and its standby."""

    def __init__(self, primary: Node, standby: Node) -> None:
        self.primary = primary
        self.standby = standby

    @property
    def conninfo(self) -> str:
        """Where a client finds whichever of them is the primary."""
        ports = f"{self.primary.port},{self.standby.port}"
        return f"host=127.0.0.1,127.0.0.1 port={ports} user=demo dbname=demo target_session_attrs=read-write"

    def replicate_synchronously(self, synchronous_commit: str) -> None:
        """From here on a COMMIT waits for the standby."""
        self.primary.set("synchronous_commit", synchronous_commit)
        self.primary.set("synchronous_standby_names", STANDBY)
        with self.primary.superuser() as conn:
            state = "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'"
            until("the standby is a synchronous one", lambda: conn.execute(state).fetchone() is not None)

    def until_replayed(self) -> None:
        """Wait until the standby has all of now."""
        with self.primary.superuser() as primary, self.standby.superuser() as standby:
            [(end,)] = primary.execute("SELECT pg_current_wal_lsn()")
            replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            until("the standby has replayed it all", lambda: standby.execute(replayed, [end]).fetchone() == (True,))

    def cut(self) -> None:
        """Cut the link between the two. Both go on, and clients reach both."""
        self.standby.set("primary_conninfo", "")
        with self.primary.superuser() as primary, self.standby.superuser() as standby:
            receivers = "SELECT FROM pg_stat_wal_receiver"
            until("the standby receives no more", lambda: standby.execute(receivers).fetchone() is None)
            senders = "SELECT FROM pg_stat_replication"
            until("the primary sends no more", lambda: primary.execute(senders).fetchone() is None)


@contextmanager
def streaming_pair(bindir: Path, runas: str | None) -> Iterator[Pair]:
    """Run a primary and a standby for the block, with the extension in their database `demo`."""
    with ExitStack() as stack:
        primary = stack.enter_context(throwaway_server(bindir, runas, Node))
        standby = stack.enter_context(throwaway_server(bindir, runas, partial(Standby, primary)))
        yield Pair(primary, standby)
