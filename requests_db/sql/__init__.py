# SPDX-License-Identifier: Apache-2.0
"""The SQL: tables, how records are stored in rows, every statement, and the queries that read."""
