"""The table of orders."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("customer", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("orders")
