# SPDX-License-Identifier: Apache-2.0
"""Environments and replicas that are asleep."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_BEFORE, _AFTER = ("PENDING", "STARTING", "READY", "DEGRADED"), ("FAILED", "STOPPING", "STOPPED")
_OF_ENVIRONMENT = (*_BEFORE, "ASLEEP", *_AFTER)
_OF_REPLICA = ("STARTING", "READY", "ASLEEP", "DRAINING", "BACKING_OFF", "FAILED", "STOPPED")


def upgrade() -> None:
    """Make the tables anew, with the state among those that they allow."""
    _make_anew(
        "environments",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("request_id", sa.String(16)),
        sa.Column("address", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("generation", sa.Integer, nullable=False, server_default=sa.text("1")),
        states=_OF_ENVIRONMENT,
    )
    op.drop_index("ix_replicas_environment", "replicas")
    _make_anew(
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
        states=_OF_REPLICA,
    )
    op.create_index("ix_replicas_environment", "replicas", ["environment"])


def _make_anew(table: str, *columns: sa.Column[object], states: tuple[str, ...]) -> None:
    names = ", ".join(column.name for column in columns)
    allowed = ", ".join(f"'{state}'" for state in states)
    op.rename_table(table, "old")
    check = sa.CheckConstraint(f"state IN ({allowed})", name=f"ck_{table}_state")
    op.create_table(table, *columns, check)
    op.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM old")  # noqa: S608  ours
    op.drop_table("old")


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
