"""Two PostgreSQL nodes under Patroni, with an etcd of their own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from polling import until
from server import HBA, as_user, check_user, free_port, no_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator

ETCD = "/usr/bin/etcd"
PATRONI = "/usr/bin/patroni"

# As swift as Patroni allows: a loop and two retries have to fit into the TTL.
TTL = 8
LOOP_WAIT = 1
RETRY_TIMEOUT = 3


class Daemon:
    """A program in a process group of its own, with its log in its folder."""

    def __init__(self, folder: Path, runas: str | None) -> None:
        folder.mkdir(mode=0o700)
        if runas:
            shutil.chown(folder, runas)
        self.folder = folder
        self.log = folder / "log"
        self._runas = runas
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *command: str | Path) -> None:
        """Start it."""
        # What other clusters of this machine have set is not for these.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PATRONI", "ETCD"))}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **as_user(self._runas, self.folder),
            )

    def kill(self) -> None:
        """SIGKILL to all of its process group."""
        if self._process is not None and self._process.returncode is None:  # else the number may be another's by now
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log_tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


class Node(Daemon):
    """A Patroni and its PostgreSQL."""

    def __init__(self, name: str, folder: Path, runas: str | None) -> None:
        super().__init__(folder, runas)
        self.name = name
        self.port = free_port()
        self.api = f"127.0.0.1:{free_port()}"
        self._configuration = folder / "patroni.yml"

    def configure(self, configuration: dict[str, Any]) -> None:
        """Write Patroni's file."""
        self._configuration.touch(0o600)
        if self._runas:
            shutil.chown(self._configuration, self._runas)
        self._configuration.write_text(json.dumps(configuration))  # which is YAML too

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        self.run(PATRONI, self._configuration)

    def kill(self) -> None:
        """SIGKILL to Patroni and to all of PostgreSQL."""
        super().kill()
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until("PostgreSQL is gone", lambda: not self._processes())

    def stop(self) -> None:
        """Stop both. Not by Patroni, which takes its time; but so that PostgreSQL gives back its shared memory."""
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
        with suppress(OSError, ValueError, IndexError):
            postmaster = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
            if postmaster in self._processes():
                os.kill(postmaster, signal.SIGQUIT)
                until("PostgreSQL is gone", lambda: not self._processes())
        self.kill()

    def superuser(self, database: str) -> psycopg.Connection:
        """A new session of the superuser."""
        return psycopg.connect(host=str(self.folder), port=self.port, user="postgres", dbname=database, autocommit=True)

    def _processes(self) -> list[int]:
        """All processes that work in our data directory."""
        data = str((self.folder / "data").resolve())
        found = []
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # gone, or of another user
                if os.readlink(link) == data:
                    found.append(int(link.parent.name))
        return found


class Cluster:
    """Two nodes, one of which is the primary."""

    def __init__(self, folder: Path, bindir: Path, runas: str | None) -> None:
        self.is_synchronous = False
        self._bindir = bindir
        self._password = secrets.token_hex()
        self._etcd = Daemon(folder / "etcd", runas)
        self._etcd_port = free_port()
        self.nodes = [Node(name, folder / name, runas) for name in ("a", "b")]

    @property
    def conninfo(self) -> str:
        """Where a client finds whichever of them is the primary."""
        hosts, ports = ",".join("127.0.0.1" for _ in self.nodes), ",".join(str(node.port) for node in self.nodes)
        return f"host={hosts} port={ports} user=demo dbname=demo"

    def start(self) -> None:
        """Start etcd and the nodes, and make the database `demo` with the extension."""
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, free_port()))
        self._etcd.run(
            ETCD,
            *("--name", "etcd", "--data-dir", self._etcd.folder / "data"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"etcd={peer}"),
        )
        until("etcd is healthy", lambda: _get(f"127.0.0.1:{self._etcd_port}", "health").get("health") == "true")
        for node in self.nodes:
            node.configure(self._configuration(node))
        first, second = self.nodes
        first.start()
        until("the first node is the primary", lambda: self.primary() is first)
        with first.superuser("postgres") as conn:
            conn.execute("CREATE ROLE demo LOGIN")
            conn.execute("CREATE DATABASE demo OWNER demo")
        with first.superuser("demo") as conn:
            conn.execute("CREATE EXTENSION named_locks")
        second.start()
        self.until_replicated()

    def stop(self) -> None:
        """Stop all."""
        for node in self.nodes:
            node.stop()
        self._etcd.kill()

    def print_logs(self) -> None:
        """For the report of a test that has failed."""
        for daemon in (self._etcd, *self.nodes):
            print(f"--- {daemon.folder.name}\n{daemon.log_tail()}")

    def primary(self) -> Node | None:
        """The node that is the primary and has Patroni's word for it; None in between."""
        return next((node for node in self.nodes if _get(node.api, "primary")), None)

    def standby_of(self, primary: Node) -> Node:
        """The other one."""
        [standby] = [node for node in self.nodes if node is not primary]
        return standby

    def until_replicated(self) -> Node:
        """Wait until the standby streams, and may take over as far as Patroni is concerned; the primary."""
        role, state = ("sync_standby", "sync") if self.is_synchronous else ("replica", "async")
        query = (
            "SELECT FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming' AND sync_state = %s"
        )

        def is_replicated() -> Node | None:
            primary = self.primary()
            if primary is None:
                return None
            standby = self.standby_of(primary)
            members = _get(primary.api, "cluster").get("members", [])
            [known] = [member for member in members if member["name"] == standby.name] or [{}]
            # "running": it is no base backup any more that streams.
            if (known.get("role"), known.get("state")) not in ((role, "running"), (role, "streaming")):
                return None
            try:
                with primary.superuser("postgres") as conn:
                    return primary if conn.execute(query, [standby.name, state]).fetchone() is not None else None
            except psycopg.OperationalError:
                return None

        return until("the standby streams", is_replicated)

    def set_synchronous(self, is_synchronous: bool) -> None:
        """Patroni's synchronous_mode."""
        self.is_synchronous = is_synchronous
        _send("PATCH", self.nodes[0].api, "config", {"synchronous_mode": is_synchronous})
        self.until_replicated()

    def switchover(self, primary: Node) -> None:
        """Let the standby become the primary, in an orderly manner."""
        request = {"leader": primary.name, "candidate": self.standby_of(primary).name}
        _send("POST", primary.api, "switchover", request)

    @contextmanager
    def link_at_a_standstill(self, primary: Node) -> Iterator[None]:
        """The primary sends nothing to the standby in this block. It has to be dead at its end."""
        with primary.superuser("postgres") as conn:
            [(sender,)] = conn.execute("SELECT pid FROM pg_stat_replication WHERE state = 'streaming'")
        os.kill(sender, signal.SIGSTOP)
        try:
            yield
        except BaseException:
            os.kill(sender, signal.SIGCONT)
            raise

    def _configuration(self, node: Node) -> dict[str, Any]:
        hba = [*HBA.splitlines(), "local replication all trust"]
        hba += [f"host {database} postgres 127.0.0.1/32 scram-sha-256" for database in ("all", "replication")]
        superuser = {"username": "postgres", "password": self._password}
        return {
            "scope": "field",
            "name": node.name,
            "restapi": {"listen": node.api, "connect_address": node.api},
            "etcd3": {"hosts": f"127.0.0.1:{self._etcd_port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL,
                    "loop_wait": LOOP_WAIT,
                    "retry_timeout": RETRY_TIMEOUT,
                    "postgresql": {"use_pg_rewind": True},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}, {"wal-segsize": "1"}, "no-sync"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{node.port}",
                "connect_address": f"127.0.0.1:{node.port}",
                "bin_dir": str(self._bindir),
                "data_dir": str(node.folder / "data"),
                "pgpass": str(node.folder / "pgpass"),
                "use_unix_socket": True,
                "authentication": {"superuser": superuser, "replication": superuser},
                "pg_hba": hba,
                "parameters": {
                    "unix_socket_directories": str(node.folder),
                    "fsync": "off",  # the operating system does not crash here
                    "shared_buffers": "16MB",
                    "logging_collector": "off",
                },
                "basebackup": [{"checkpoint": "fast"}, "no-sync"],
                "remove_data_directory_on_rewind_failure": True,
                "remove_data_directory_on_diverged_timelines": True,
            },
        }


def _get(address: str, path: str) -> dict[str, Any]:
    """What a REST interface answers; empty if it does not."""
    try:
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=5) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except (OSError, ValueError):
        return {}


def _send(method: str, address: str, path: str, document: dict[str, Any]) -> None:
    """Ask a REST interface to do something, and wait until it has."""
    request = urllib.request.Request(f"http://{address}/{path}", json.dumps(document).encode(), method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200, answer.read()


@contextmanager
def patroni_cluster(bindir: Path, runas: str | None) -> Iterator[Cluster]:
    """Run a cluster for the block, with the extension in its database `demo`."""
    check_user(runas)
    folder = Path(tempfile.mkdtemp(prefix="named_locks-", dir="/tmp"))
    folder.chmod(0o755)  # what is in it is closed
    cluster = Cluster(folder, bindir, runas)
    try:
        cluster.start()
        yield cluster
    finally:
        with no_interrupts():
            cluster.stop()
            cluster.print_logs()
            shutil.rmtree(folder, ignore_errors=True)
