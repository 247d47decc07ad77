"""The example for Django: locks in the ORM's transactions, and a command that runs in one place at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, transaction

from polling import PATIENCE, until
from stage import held_up
from views import held

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from programs import Programs
    from server import Server

EXAMPLES = Path(__file__).parents[1] / "examples/clients/python"
SOON = timedelta(milliseconds=200)


def environment(server: Server) -> dict[str, str]:
    """What the site's settings ask for."""
    return {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(server.port),
        "PGUSER": "demo",
        "DJANGO_SETTINGS_MODULE": "django_site.settings",
        "PYTHONPATH": str(EXAMPLES),
    }


@pytest.fixture(scope="module")
def site(server: Server) -> Iterator[Any]:
    """The site, set up in this process, with the table of its model."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(server).items():
            patch.setenv(name, value)
        django.setup()
        import django_site.locks
        import django_site.models

        with connection.schema_editor() as editor:
            editor.create_model(django_site.models.Account)
        yield django_site
        connection.close()


@pytest.fixture
def account(site: Any) -> Iterator[Any]:
    """An account of 1,000."""
    account = site.models.Account.objects.create(balance=1000)
    yield account
    site.models.Account.objects.all().delete()
    connection.close()


def test_the_lock_ends_with_the_transaction(site: Any, account: Any, other: psycopg.Connection) -> None:
    with site.locks.named_xact_lock("account:1", SOON):
        assert held(other) == [("transaction", "account:1")]
    assert held(other) == []
    with pytest.raises(ZeroDivisionError), site.locks.named_xact_lock("account:1", SOON):
        account.balance = 0
        account.save()
        raise ZeroDivisionError
    assert held(other) == []
    account.refresh_from_db()
    assert account.balance == 1000


def test_within_a_transaction_the_lock_stays_to_its_end(site: Any, account: Any, other: psycopg.Connection) -> None:
    with transaction.atomic():
        with site.locks.named_xact_lock("account:1", SOON):
            pass
        assert held(other) == [("transaction", "account:1")]
        with pytest.raises(ZeroDivisionError), site.locks.named_xact_lock("account:2", SOON):
            raise ZeroDivisionError
        assert held(other) == [("transaction", "account:1")], "a savepoint that was rolled back keeps no lock"
        transaction.set_rollback(True)
    assert held(other) == []


def test_a_timeout_is_an_operational_error(site: Any, account: Any, other: psycopg.Connection) -> None:
    other.execute("SELECT named_lock('account:1')")
    with transaction.atomic():
        account.balance = 2000
        account.save()
        taking = site.locks.named_xact_lock("account:1", SOON)
        with pytest.raises(OperationalError, match="account:1") as refused, taking:
            pytest.fail("two hold it")
        assert site.locks.sqlstate(refused.value) == "55P03"
        assert "other" in str(refused.value)
        site.models.Account.objects.create(balance=1)  # the savepoint is rolled back, the transaction goes on
    assert sorted(site.models.Account.objects.values_list("balance", flat=True)) == [1, 2000]


def test_read_compute_write_by_eight_threads(site: Any, account: Any, other: psycopg.Connection) -> None:
    def deposit(_number: int) -> None:
        for _ in range(10):
            with site.locks.named_xact_lock(f"account:{account.pk}", timedelta(seconds=PATIENCE)):
                mine = site.models.Account.objects.get(pk=account.pk)
                mine.balance += 1
                mine.save()
        connection.close()  # each thread has its own

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(deposit, range(8)))
    account.refresh_from_db()
    assert account.balance == 1080


def test_a_session_lock_is_for_outside_of_transactions(site: Any, account: Any, other: psycopg.Connection) -> None:
    with site.locks.named_lock("interest") as acquired:
        assert acquired
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            raise ZeroDivisionError
        assert held(other) == [("session", "interest")]
    assert held(other) == []
    with pytest.raises(transaction.TransactionManagementError), transaction.atomic(), site.locks.named_lock("interest"):
        pytest.fail("in a transaction")
    # Its session ends in the block: nothing to give back.
    with site.locks.named_lock("interest"):
        other.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        with pytest.raises(OperationalError):
            account.refresh_from_db()
    connection.close()


def test_a_command_ends_where_another_runs_it(site: Any, account: Any, other: psycopg.Connection) -> None:
    other.execute("SELECT named_lock('interest')")
    said = StringIO()
    call_command("pay_interest", stdout=said)
    assert said.getvalue() == "interest: runs elsewhere\n"
    other.execute("SELECT named_unlock('interest')")
    call_command("pay_interest", stdout=said)
    account.refresh_from_db()
    assert account.balance == 1001


def test_of_three_pods_one_runs_the_command(
    server: Server, site: Any, account: Any, other: psycopg.Connection, programs: Programs
) -> None:
    command = ["-m", "django", "pay_interest"]
    with held_up(server, "django_site_account", "SHARE"):
        pods = [programs.start(f"pod-{number}", *command, **environment(server)) for number in range(1, 4)]
        until("two have ended", lambda: sum(pod.ended for pod in pods) == 2)
        assert held(other) == [("session", "interest")]
    assert [pod.result() for pod in pods] == [0, 0, 0]
    assert sorted(pod.output for pod in pods) == ["interest: runs elsewhere\n", "interest: runs elsewhere\n", "paid\n"]
    account.refresh_from_db()
    assert account.balance == 1001
    until("the command's session has ended", lambda: held(other) == [])
