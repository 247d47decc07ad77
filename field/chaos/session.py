"""A connection to the server, straight or through a pooler, that notes how it began and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from chaos.history import now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos.history import History


class Lost(Exception):
    """The connection has ended."""


@dataclass(frozen=True)
class Route:
    """A way to the server."""

    name: str  # direct, session, transaction
    conninfo: str

    @property
    def keeps_session(self) -> bool:
        """Whether one server session is ours as long as the connection is."""
        return self.name != "transaction"


@dataclass
class Session:
    """One connection."""

    history: History
    route: Route
    name: str
    sent: int = field(default=0, init=False)  # when the last statement was sent

    def __post_init__(self) -> None:
        # A pooler's server sessions have other clients' prepared statements.
        self.conn = psycopg.connect(
            self.route.conninfo,
            application_name=f"{self.route.name} {self.history.who}",
            autocommit=True,
            connect_timeout=5,
            prepare_threshold=5 if self.route.name == "direct" else None,
        )
        [(pid,)] = self.conn.execute("SELECT pg_backend_pid()")
        self.pid = pid if self.route.keeps_session else None
        self.history.note("open", session=self.name, route=self.route.name, pid=self.pid)

    def run(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows. Raises Lost when the connection has ended, psycopg.Error when the statement alone has failed."""
        self.sent = now()
        try:
            cursor = self.conn.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            if not self.conn.closed and error.diag.severity_nonlocalized not in ("FATAL", "PANIC"):
                self.history.note("error", session=self.name, sqlstate=error.sqlstate, text=one_line(error))
                raise
            self.conn.close()
            self.history.note("lost", session=self.name, sqlstate=error.sqlstate, text=one_line(error))
            raise Lost from error

    def run_in_any_case(self, statement: str) -> list[tuple[Any, ...]]:
        """Run something that can only fail because it was cancelled, until it was not."""
        while True:
            try:
                return self.run(statement)
            except psycopg.errors.QueryCanceled:
                continue


def one_line(error: Exception) -> str:
    """An error's text."""
    return " ".join(str(error).split())
