# SPDX-License-Identifier: Apache-2.0
"""The first tables.

A migration is frozen when it is released: it spells out what the tables were then, and imports
nothing of `tables.py`, which goes on changing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_FINAL = "state IN ('SUCCEEDED', 'FAILED', 'CANCELLED')"


def upgrade() -> None:
    """Make the tables, and the tally's one row."""
    op.create_table(
        "requests",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("operation", sa.Text, nullable=False),
        sa.Column("schedule", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("environment", sa.Text),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("timeout_seconds", sa.Double),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("cancel_requested_at", sa.Double),
        sa.Column("worker", sa.Text),
        sa.Column("worker_pid", sa.Integer),
        sa.Column("worker_started_at", sa.Double),
        sa.Column("peak_bytes", sa.BigInteger),
        sa.Column("result", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("rank", sa.Double, nullable=False, server_default=sa.text("0")),
        sa.Column("retry_oom", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("memory_bytes", sa.BigInteger),
        sa.Column("lost_daemons", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("traceparent", sa.Text),
        sa.CheckConstraint(
            "state IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED')",
            name="ck_requests_state",
        ),
        sa.CheckConstraint("schedule IN ('LONG', 'SHORT')", name="ck_requests_schedule"),
        sa.CheckConstraint(
            f"(finished_at IS NOT NULL) = ({_FINAL})", name="ck_requests_finished_at"
        ),
        sa.CheckConstraint(
            "state != 'RUNNING' OR (started_at IS NOT NULL AND attempts > 0)",
            name="ck_requests_started_at",
        ),
        sa.CheckConstraint("error IS NULL OR state = 'FAILED'", name="ck_requests_error"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_requests_id", "requests", ["id"], unique=True)
    op.create_index(
        "ix_requests_idempotency_key",
        "requests",
        ["idempotency_key"],
        unique=True,
        sqlite_where=sa.text("idempotency_key IS NOT NULL"),
    )
    op.create_index(
        "ix_requests_claim",
        "requests",
        ["schedule", "rank", "seq"],
        sqlite_where=sa.text("state = 'PENDING'"),
    )
    op.create_index(
        "ix_requests_unfinished", "requests", ["seq"], sqlite_where=sa.text("finished_at IS NULL")
    )
    op.create_index(
        "ix_requests_failed", "requests", ["seq"], sqlite_where=sa.text("state = 'FAILED'")
    )
    op.create_index(
        "ix_requests_environment",
        "requests",
        ["environment", "seq"],
        sqlite_where=sa.text("environment IS NOT NULL"),
    )
    op.create_table(
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
        sa.CheckConstraint(
            "state IN ('PENDING', 'STARTING', 'READY', 'DEGRADED', 'ASLEEP', 'FAILED',"
            " 'STOPPING', 'STOPPED')",
            name="ck_environments_state",
        ),
    )
    op.create_table(
        "generations",
        sa.Column("environment", sa.Text, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.String(16), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("served_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("error", sa.Text),
        sa.CheckConstraint(
            "state IN ('STARTING', 'SERVING', 'DRAINING', 'RETIRED', 'FAILED')",
            name="ck_generations_state",
        ),
    )
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
        sa.CheckConstraint(
            "state IN ('STARTING', 'READY', 'ASLEEP', 'DRAINING', 'BACKING_OFF', 'FAILED',"
            " 'STOPPED')",
            name="ck_replicas_state",
        ),
    )
    op.create_index("ix_replicas_environment", "replicas", ["environment"])
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("request_id", sa.String(16)),
        sa.Column("request_seq", sa.BigInteger),
        sa.Column("environment", sa.Text),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_index("ix_events_request_seq", "events", ["request_seq"])
    states = ("pending", "running", "succeeded", "failed", "cancelled")
    tally = op.create_table(
        "tally",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("last_event", sa.BigInteger, nullable=False),
        *(sa.Column(state, sa.BigInteger, nullable=False) for state in states),
        sa.Column("run_seconds", sa.Double, nullable=False, server_default=sa.text("0")),
        sa.CheckConstraint("id = 1", name="ck_tally_one_row"),
    )
    op.create_table(
        "marks",
        sa.Column("run_seconds", sa.Double, primary_key=True),
        sa.Column("last_event", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "expectations",
        sa.Column("operation", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("samples", sa.Text, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.bulk_insert(tally, [{"id": 1, "last_event": 0, **dict.fromkeys(states, 0)}])


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
