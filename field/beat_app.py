"""The Celery app of test_celery.py. Its broker is a table: Beat and worker are real and need no other server."""

from __future__ import annotations

import os
from datetime import timedelta

import psycopg
from celery import Celery, Task
from kombu.transport.sqlalchemy import Transport

INTERVAL = timedelta(seconds=0.5)
TTL = timedelta(seconds=3)
LEASE = "beat:app"

conninfo = os.environ["BEAT_CONNINFO"]

Transport.polling_interval = 0.1  # seconds; there is no option for it
app = Celery("beat_app", broker=os.environ["BEAT_BROKER"], set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    worker_enable_remote_control=False,
    beat_schedule={"tick": {"task": "tick", "schedule": INTERVAL}},
    beat_lease={"conninfo": conninfo, "name": LEASE, "ttl": TTL},
)


@app.task(name="tick", bind=True)
def tick(self: Task) -> None:
    """Write down that it has arrived."""
    sent = self.request
    with psycopg.connect(conninfo) as conn:
        conn.execute("INSERT INTO tick VALUES (%s, %s, %s)", [sent.beat_run, sent.beat_run_at, sent.beat_token])
