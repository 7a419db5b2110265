# SPDX-License-Identifier: Apache-2.0
"""The number of the first tables, from which the next migration upgrades.

This migration never runs: `migrate.open_database` makes a fresh database with today's tables,
and stamps it with the latest revision.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: `tables.py` makes the first tables."""
