# SPDX-License-Identifier: Apache-2.0
"""Connections to the database's file: SQLite's settings and errors, the write lock, checkpoints."""
