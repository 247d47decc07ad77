"""A job that every pod starts and one does."""

from __future__ import annotations

from typing import Any

from django_site.locks import OnlyOneCommand
from django_site.models import Account


class Command(OnlyOneCommand):
    """Pay interest on all accounts."""

    help = __doc__
    lock_name = "interest"

    def handle_alone(self, *_args: Any, **_options: Any) -> str:
        """One account after the other."""
        for account in Account.objects.all():
            account.balance += 1
            account.save()
        return "paid"
