"""Daily report: eight workers race for it, one runs it.

The workers are equal, and nobody is told beforehand which of them is to do the work. The lock's name holds the date:
tomorrow's report is another lock.
"""

from __future__ import annotations

from collections import Counter
from datetime import date

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show_locks


def run_once(conn: psycopg.Connection, day: date, patience: str = "0") -> str:
    """Run a day's report unless someone has run it or is at it; say which it was.

    With the patience of 0 that is one try. Someone with more waits for the one who is at it, and would do the work
    if that one failed.
    """
    name = f"report:daily:{day}"
    [(locked,)] = conn.execute("SELECT named_lock(%s, timeout => %s)", [name, patience])
    if not locked:
        return "someone is at it"
    try:
        if conn.execute("SELECT 1 FROM daily_report WHERE day = %s", [day]).fetchone():
            return "it is done"
        write_report(conn, day)
        return "ran it"
    finally:
        conn.execute("SELECT named_unlock(%s)", [name])


def write_report(conn: psycopg.Connection, day: date) -> None:
    """The work itself."""
    conn.execute(
        """INSERT INTO daily_report (day, sales, total, written_by)
           SELECT %s, count(*), sum(amount), current_setting('application_name') FROM sale WHERE day = %s""",
        [day, day],
    )


# The demonstration -------------------------------------------------------------------------------------------------

# No unique constraint: nothing but the lock keeps a second report out.
TABLES = """
    CREATE TABLE sale (day date, amount numeric);
    CREATE TABLE daily_report (day date, sales bigint, total numeric, written_by text);
"""


def demo(server: Server) -> Checks:
    """Four workers without patience and four with some, all at once."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        today = date.today()
        conn.execute(TABLES)
        conn.execute("INSERT INTO sale SELECT %s, n %% 90 FROM generate_series(1, 1000) AS n", [today])
        with held_up(server, "daily_report", "SHARE"):
            for number in range(1, 9):
                crew.add(f"worker-{number}", run_once, today, "0" if number % 2 else "30 s")
            crew.go()
            checks.until(
                "one worker has the lock, the others wait or have gone",
                lambda: count(conn, "lock_holders") == 1 and count(conn, "lock_waiters") + crew.answered() == 7,
            )
            show_locks(conn)
            holders = [row[0] for row in conn.execute("SELECT application_name FROM lock_holders")]
        answers = crew.answers()
        checks.no_errors(answers)
        told = Counter(answer.value for answer in answers)
        summary = ", ".join(f"{answer} ({times})" for answer, times in told.most_common())
        checks.that(told["ran it"] == 1, f"exactly one ran it: {summary}")
        authors = [row[0] for row in conn.execute("SELECT written_by FROM daily_report")]
        checks.that(authors == holders, "one report was written, by the holder", f"{authors}, held by {holders}")
        checks.that(count(conn, "lock_holders") == 0, "every lock was given back")
    return checks
