"""Orders to begin with. Run twice, there would be twice as many."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("INSERT INTO orders (customer) SELECT n % 500 FROM generate_series(1, 50000) AS n")


def downgrade() -> None:
    op.execute("TRUNCATE orders")
