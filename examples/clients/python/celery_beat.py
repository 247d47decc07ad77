"""Celery Beat on several machines: one of them schedules, the others stand by and take over.

    app.conf.beat_lease = {"conninfo": "…", "name": "beat:app", "ttl": timedelta(seconds=10)}

    celery -A app beat --scheduler celery_beat:LeaseScheduler

The one with the lease schedules. It claims each run in the database before it sends the task: in one statement that is
refused unless it holds the lease. So a run is sent once or, if Beat dies between the two, not at all, and a Beat that was
paused for longer than its lease sends nothing when it wakes up. The next leader goes on from what was claimed. A dead one
is followed within the TTL, one that is told to end (SIGTERM) at once.

Tasks find three headers: `beat_run`, the number of the entry's run, `beat_run_at`, its time, and `beat_token`, the lease's
token: a receiver that must not take orders from a leader of the past compares it with the highest it has seen.
"""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
from celery.beat import ScheduleEntry, Scheduler
from celery.utils.log import get_logger

if TYPE_CHECKING:
    from datetime import timedelta

logger = get_logger("celery.beat")

TABLE = """
    CREATE TABLE IF NOT EXISTS beat_run (
        lease text,
        entry text,
        last_run_at timestamptz NOT NULL,
        total_run_count bigint NOT NULL,
        PRIMARY KEY (lease, entry)
    )
"""
# The guard comes before the row, and both are one transaction with no room for a pause of ours.
CLAIM = """
    INSERT INTO beat_run
    SELECT %(lease)s, %(entry)s, %(last_run_at)s, %(total_run_count)s FROM lease_guard(%(lease)s, %(token)s)
    ON CONFLICT (lease, entry) DO UPDATE
    SET last_run_at = excluded.last_run_at, total_run_count = excluded.total_run_count
"""
RUNS = "SELECT entry, last_run_at, total_run_count FROM beat_run WHERE lease = %s"


class LeaseMixin:
    """Put before a scheduler class, it lets that one work only while it holds the lease."""

    _conn: psycopg.Connection | None = None
    _token: int | None = None
    _next_renewal = 0.0

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Lead, or wait to lead. Beat calls this again after as many seconds as it returns."""
        try:
            if not self._leads():
                return 0.0  # it has waited
            pause: float = super().tick(*args, **kwargs)
        except (psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState) as lost:  # 55006, 55000
            logger.warning("beat: leads no more: %s", lost)
            self._token = None
            self._next_renewal = 0.0
            return 0.0
        except psycopg.OperationalError as error:
            logger.warning("beat: database: %s", error)  # the lease may still be ours: that is asked next
            self._disconnect()
            return self._ttl.total_seconds() / 30
        return max(0.0, min(pause, self._next_renewal - time.monotonic()))

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Claim a run, then send it."""
        claimed = self.schedule[entry.name]
        run = {"last_run_at": claimed.last_run_at, "total_run_count": claimed.total_run_count}
        self._conn.execute(CLAIM, {"lease": self._name, "entry": entry.name, "token": self._token, **run})
        headers = {
            "beat_run": claimed.total_run_count,
            "beat_run_at": claimed.last_run_at.isoformat(),
            "beat_token": self._token,
        }
        sent = copy.copy(entry)
        sent.options = {**entry.options, "headers": {**entry.options.get("headers", {}), **headers}}
        super().apply_entry(sent, producer=producer)

    def close(self) -> None:
        """Let the next one lead."""
        super().close()
        token, self._token = self._token, None
        if token is not None:
            # By a connection of its own: a signal may have brought us here from the middle of a statement.
            with suppress(psycopg.OperationalError), self._connect() as conn:
                conn.execute("SELECT lease_release(%s, %s)", [self._name, token])

    @property
    def _name(self) -> str:
        return self.app.conf.beat_lease["name"]

    @property
    def _ttl(self) -> timedelta:
        return self.app.conf.beat_lease["ttl"]

    def _leads(self) -> bool:
        """Acquire the lease or renew it if it is time to; whether we lead."""
        now = time.monotonic()
        if now < self._next_renewal:
            return True
        third = self._ttl / 3
        resumes = self._conn is None or self._token is None
        if self._conn is None:
            self._conn = self._connect()
        if self._token is None:
            call = "CALL lease_acquire_wait(%s, %s, timeout => %s)"
            [(self._token,)] = self._conn.execute(call, [self._name, self._ttl, third])
            if self._token is None:
                return False
            logger.info("beat: leads, with token %s", self._token)
        else:
            self._conn.execute("SELECT lease_renew(%s, %s)", [self._name, self._token])
        if resumes:
            self._load_runs()
        self._next_renewal = time.monotonic() + third.total_seconds()
        return True

    def _load_runs(self) -> None:
        """Go on where the last leader, whoever it was, has stopped."""
        self._conn.execute(TABLE)
        for name, last_run_at, total_run_count in self._conn.execute(RUNS, [self._name]).fetchall():
            if name in self.schedule:
                entry = self.schedule[name]
                entry.last_run_at = entry.schedule.maybe_make_aware(last_run_at)
                entry.total_run_count = total_run_count
        self._heap = None  # made anew from the entries by the next tick

    def _connect(self) -> psycopg.Connection:
        # No prepared statements: behind a transaction pooler the next one may run on another connection.
        return psycopg.connect(self.app.conf.beat_lease["conninfo"], autocommit=True, prepare_threshold=None)

    def _disconnect(self) -> None:
        if self._conn is not None:
            self._conn.close()
        self._conn = None
        self._next_renewal = 0.0


class LeaseScheduler(LeaseMixin, Scheduler):
    """Beat's scheduler with a lease; it keeps nothing in a file."""
