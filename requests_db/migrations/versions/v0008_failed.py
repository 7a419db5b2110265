# SPDX-License-Identifier: Apache-2.0
"""The index of failed requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the index."""
    op.create_index(
        "ix_requests_failed", "requests", ["seq"], sqlite_where=sa.text("state = 'FAILED'")
    )


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
