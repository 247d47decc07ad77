"""An index on a table in use: outside of a transaction, so it has to be fit to be run again."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

INDEX = "orders_by_customer"


def upgrade() -> None:
    with op.get_context().autocommit_block():
        # Whatever is left of a run that did not come to its end: IF NOT EXISTS would be content with an invalid index.
        op.drop_index(INDEX, "orders", if_exists=True, postgresql_concurrently=True)
        op.create_index(INDEX, "orders", ["customer"], postgresql_concurrently=True)


def downgrade() -> None:
    with op.get_context().autocommit_block():
        op.drop_index(INDEX, "orders", if_exists=True, postgresql_concurrently=True)
