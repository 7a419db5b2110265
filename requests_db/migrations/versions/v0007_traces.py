# SPDX-License-Identifier: Apache-2.0
"""The trace that a request is part of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column; requests of before are part of no trace."""
    op.add_column("requests", sa.Column("traceparent", sa.Text))


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
