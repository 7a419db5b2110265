# SPDX-License-Identifier: Apache-2.0
"""Time that no wall clock tells: what is old, by how long daemons have run; and lost daemons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns and the marks; what the database has now counts as new."""
    lost = sa.Column("lost_daemons", sa.Integer, nullable=False, server_default=sa.text("0"))
    op.add_column("requests", lost)
    run = sa.Column("run_seconds", sa.Double, nullable=False, server_default=sa.text("0"))
    op.add_column("tally", run)
    op.create_table(
        "marks",
        sa.Column("run_seconds", sa.Double, primary_key=True),
        sa.Column("last_event", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
