"""The least that Django needs. libpq takes what is not said here from PGHOST, PGPORT and PGUSER."""

import os

INSTALLED_APPS = ["django_site"]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ.get("PGDATABASE", "demo")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
