"""Job queue: four workers claim thirty jobs by name; each is done once, and one worker dies in the middle of its job.

FOR UPDATE SKIP LOCKED shares out rows. This shares out names, so no row is locked while a job is at work: it can be
looked at, given another priority or cancelled meanwhile, and the jobs need not even be rows of this database.
"""

from __future__ import annotations

from typing import NamedTuple

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show, show_locks


class Job(NamedTuple):
    """What there is to do."""

    id: int
    recipient: str


def work_off(conn: psycopg.Connection) -> list[int]:
    """Do one job after the other, each in a transaction of its own, until none is free. Returns what was done."""
    done = []
    while True:
        with conn.transaction():
            job = claim(conn)
            if job is None:
                return done
            conn.execute("INSERT INTO outbox (job, letter) VALUES (%s, %s)", [job.id, f"Dear {job.recipient}"])
            conn.execute("UPDATE jobs SET done_at = clock_timestamp() WHERE id = %s", [job.id])
        done.append(job.id)


def claim(conn: psycopg.Connection) -> Job | None:
    """Lock the next job that nobody is at, to the end of the transaction; None if there is none.

    More names than there are workers, so that one of them is free. Never LIMIT around the call: that would not change
    what is locked.
    """
    while True:
        claimed = conn.execute(
            """SELECT named_xact_lock_any(ARRAY(
                   SELECT 'job:' || id FROM jobs WHERE done_at IS NULL ORDER BY id LIMIT 50))"""
        ).fetchone()
        if claimed is None:
            return None
        # The names were read before the lock was had: another may have done the job in between. A new statement sees it.
        # (A name that is held already is passed over, so the next round gives another one.)
        job = conn.execute(
            "SELECT id, recipient FROM jobs WHERE 'job:' || id = %s AND done_at IS NULL", claimed
        ).fetchone()
        if job is not None:
            return Job(*job)


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE jobs (
        id bigint PRIMARY KEY,
        recipient text NOT NULL,
        done_at timestamptz
    );
    INSERT INTO jobs SELECT n, 'customer ' || n FROM generate_series(1, 30) AS n;
    CREATE TABLE outbox (
        job bigint NOT NULL,
        letter text NOT NULL,
        worker text NOT NULL DEFAULT current_setting('application_name')
    );
"""

JOBS = 30
WORKERS = 4


def demo(server: Server) -> Checks:
    """All are held up in their first job; the first worker is killed there; the others go on, one more does the rest."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        conn.execute(TABLES)
        with held_up(server, "outbox", "SHARE"):
            for number in range(1, WORKERS + 1):
                crew.add(f"worker-{number}", work_off)
            crew.go()
            checks.until("each worker is at a job", lambda: count(conn, "lock_holders") == WORKERS)
            show_locks(conn)
            conn.execute("UPDATE jobs SET recipient = 'the new owner' WHERE id = 1")
            checks.that(True, "a job at work can be changed: no row is locked")
            crew.kill("worker-1")
        answers = [crew.answer(f"worker-{number}") for number in range(2, WORKERS + 1)]
        checks.no_errors(answers)
        checks.until("the dead worker's job is free", lambda: count(conn, "lock_holders") == 0)
        rest = work_off(conn)
        done = sorted(rest + [job for answer in answers for job in answer.value or []])
        checks.that(done == list(range(1, JOBS + 1)), "each job was done once", done)
        checks.that(count(conn, "outbox") == JOBS, "and left one letter", count(conn, "outbox"))
        show(
            conn,
            "outbox",
            "SELECT worker, count(*) AS letters, min(job) AS first, max(job) AS last FROM outbox GROUP BY 1 ORDER BY 1",
        )
    return checks
