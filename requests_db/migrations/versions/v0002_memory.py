# SPDX-License-Identifier: Apache-2.0
"""Ageing in the queue, retries of what was killed for memory, and what peaks have taught."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns; give what waits its rank; let the claim's index follow it."""
    op.add_column("requests", _counted("rank", sa.Double))
    op.add_column("requests", _counted("retry_oom", sa.Integer))
    op.add_column("requests", sa.Column("memory_bytes", sa.BigInteger))
    op.execute("UPDATE requests SET rank = created_at - 60 * priority")
    op.drop_index("ix_requests_claim", "requests")
    is_pending = sa.text("state = 'PENDING'")
    op.create_index(
        "ix_requests_claim", "requests", ["schedule", "rank", "seq"], sqlite_where=is_pending
    )
    op.create_table(
        "expectations",
        sa.Column("operation", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("samples", sa.Text, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )


def _counted(name: str, kind: type[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=sa.text("0"))


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
