# SPDX-License-Identifier: Apache-2.0
"""The number of the first tables, from which the next migration upgrades.

This one is never run: `migrate.open_database` makes a fresh database of the tables as they are
today, and stamps it with the latest revision.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Change nothing: `tables.py` makes the first tables."""
