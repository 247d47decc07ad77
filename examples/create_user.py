"""New user: five requests for one e-mail address, one row.

A row that does not exist yet cannot be locked, but its name can. The lock ends with the transaction, so this works
behind a pooler in transaction mode too.
"""

from __future__ import annotations

import psycopg

from server import Server
from stage import Checks, count, crew_of, held_up, show, show_locks


def find_or_create_user(conn: psycopg.Connection, email: str) -> tuple[int, bool]:
    """The id of the user with this address, and whether it was made just now.

    Names are compared byte for byte: bring the address into one form first. In READ COMMITTED, the default, the
    SELECT after the wait sees what the one who was first has committed.
    """
    email = email.strip().lower()
    with conn.transaction():
        conn.execute("SELECT named_xact_lock(%s)", [f"user:{email}"])
        found = conn.execute("SELECT id FROM users WHERE email = %s", [email]).fetchone()
        if found:
            return found[0], False
        [(user_id,)] = conn.execute("INSERT INTO users (email) VALUES (%s) RETURNING id", [email])
        # Here is room for what ON CONFLICT cannot do: the mailbox, the welcome gift, a call to another service.
        return user_id, True


# The demonstration -------------------------------------------------------------------------------------------------

TABLES = """
    CREATE TABLE users (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        email text NOT NULL UNIQUE,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""

SPELLINGS = ["ada@example.org", "Ada@Example.org", "ada@example.org ", "ADA@example.org", "ada@example.org"]


def demo(server: Server) -> Checks:
    """Five at once: the first is held up between its SELECT and its INSERT, where the others would see no row."""
    checks = Checks()
    with server.connect("demo") as conn, crew_of(server) as crew:
        conn.execute(TABLES)
        with held_up(server, "users", "SHARE"):
            for number, spelling in enumerate(SPELLINGS, start=1):
                crew.add(f"request-{number}", find_or_create_user, spelling)
            crew.go()
            checks.until(
                "one request is at it, four wait",
                lambda: count(conn, "lock_holders") == 1 and count(conn, "lock_waiters") == 4,
            )
            show_locks(conn)
        answers = crew.answers()
        if checks.no_errors(answers):
            made = [answer.value for answer in answers if answer.value[1]]
            ids = {answer.value[0] for answer in answers}
            checks.that(len(made) == 1, "exactly one made the user", made)
            checks.that(len(ids) == 1, "all five got the same id", ids)
        show(conn, "users", "SELECT id, email FROM users")
        checks.that(count(conn, "users") == 1, "there is one row")
        checks.that(count(conn, "lock_holders") == 0, "the locks ended with their transactions")
    return checks
