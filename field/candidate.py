"""A candidate for leader, as a process of its own: candidate.py CLIENT CONNINFO STORE FOLDER.

The leader writes into the table `log` of its cluster, under its lease, and into the store with the token. All of it is
noted in the folder. SIGTERM ends it.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import psycopg

from leader_failover import Term, lead
from load import write
from notes import Notes

LEASE = "leader"
TTL = timedelta(seconds=5)

LOG = """
    CREATE TABLE log (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        client text NOT NULL,
        token bigint NOT NULL,
        number integer NOT NULL,
        UNIQUE (client, number)
    )
"""


class Candidate:
    """Leads, whenever it is elected."""

    def __init__(self, client: str, elsewhere: psycopg.Connection, notes: Notes) -> None:
        self._client = client
        self._elsewhere = elsewhere
        self._notes = notes
        self._numbers = itertools.count(1)
        self._term: Term | None = None

    def run(self, conninfo: str) -> None:
        """One term after the other."""
        while True:
            self._term = None
            try:
                lead(conninfo, LEASE, TTL, self._duty)
            finally:
                if self._term is not None:
                    self._notes.add("leads no more", token=self._term.token, until=self._term.until)

    def _duty(self, conn: psycopg.Connection, term: Term) -> None:
        if self._term is None:
            self._term = term
            self._notes.add("leads", token=term.token)
        number = next(self._numbers)
        with conn.transaction():
            conn.execute("SELECT lease_guard(%s, %s)", [LEASE, term.token])
            conn.execute(
                "INSERT INTO log (client, token, number) VALUES (%s, %s, %s)", [self._client, term.token, number]
            )
        self._notes.add("wrote", token=term.token, number=number, server=conn.info.port)
        if not write(self._elsewhere, LEASE, term.token, self._client):
            self._notes.add("refused elsewhere", token=term.token)
        time.sleep(0.02)


def main(client: str, conninfo: str, store: str, folder: str) -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with psycopg.connect(store, autocommit=True, application_name=client) as elsewhere:
        Candidate(client, elsewhere, Notes(Path(folder), client)).run(f"{conninfo} application_name={client}")


if __name__ == "__main__":
    main(*sys.argv[1:])
