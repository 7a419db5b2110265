# SPDX-License-Identifier: Apache-2.0
"""Replicas that are drained."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_STATES = ("STARTING", "READY", "DRAINING", "BACKING_OFF", "FAILED", "STOPPED")


def upgrade() -> None:
    """Make the table anew, with the state among those that it allows."""
    op.drop_index("ix_replicas_environment", "replicas")
    op.rename_table("replicas", "old_replicas")
    listed = ", ".join(f"'{state}'" for state in _STATES)
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("provider", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("pid", sa.Integer),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("exit", sa.Text),
        sa.CheckConstraint(f"state IN ({listed})", name="ck_replicas_state"),
    )
    op.create_index("ix_replicas_environment", "replicas", ["environment"])
    op.execute("INSERT INTO replicas SELECT * FROM old_replicas")
    op.drop_table("old_replicas")


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
