# SPDX-License-Identifier: Apache-2.0
"""The history of environments: a row for each launch of a name."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_STATE_OF = {
    "PENDING": "STARTING",
    "STARTING": "STARTING",
    "READY": "SERVING",
    "DEGRADED": "SERVING",
    "STOPPING": "SERVING",
    "FAILED": "FAILED",
    "STOPPED": "RETIRED",
}
_SECRET = frozenset({"token", "env"})


def upgrade() -> None:
    """Make the table; each environment that is known is the first generation of its name."""
    number = sa.Column("generation", sa.Integer, nullable=False, server_default=sa.text("1"))
    op.add_column("environments", number)
    states = "'STARTING', 'SERVING', 'DRAINING', 'RETIRED', 'FAILED'"
    generations = op.create_table(
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
        sa.CheckConstraint(f"state IN ({states})", name="ck_generations_state"),
    )
    query = "SELECT name, request_id, spec, state, created_at, error FROM environments"
    known = op.get_bind().exec_driver_sql(f"{query} WHERE request_id IS NOT NULL").all()
    rows = [
        {
            "environment": name,
            "number": 1,
            "request_id": request_id,
            "spec": json.dumps({k: v for k, v in json.loads(spec).items() if k not in _SECRET}),
            "state": _STATE_OF[state],
            "created_at": created_at,
            "error": json.loads(error)["message"] if error else None,
        }
        for name, request_id, spec, state, created_at, error in known
    ]
    op.bulk_insert(generations, rows)


def downgrade() -> None:
    """Not offered: an older openenvd says that the database is too new."""
    raise NotImplementedError
