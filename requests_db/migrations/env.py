# SPDX-License-Identifier: Apache-2.0
"""Alembic's entry: it runs the migrations on the connection that `migrate.upgrade` hands over."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection)
context.run_migrations()
