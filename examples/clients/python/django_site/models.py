"""What the command works on."""

from __future__ import annotations

from django.db import models


class Account(models.Model):
    """A balance, to be read, computed and written."""

    balance = models.IntegerField()

    class Meta:
        app_label = "django_site"
