# SPDX-License-Identifier: Apache-2.0
"""Alembic's migrations: `versions/` in their order, `env.py` to run them."""
