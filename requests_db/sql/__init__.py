# SPDX-License-Identifier: Apache-2.0
"""The SQL: tables, how records stand in their rows, every statement, and the queries that read."""
