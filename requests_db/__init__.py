# SPDX-License-Identifier: Apache-2.0
"""Stores requests and their states: the tables, the transitions, the queue; all SQL.

    open_database(path) ──▶ a database at this code's version          migrate.py
    WriteConnection  the dispatcher's thread: claim, record, recover   connections/
    AsyncStore       the API's loop: submit, cancel, list, observe     async_store.py
       │
       ▼
    transactions/   submitting, dispatching, recovery, retention, observing; the journal of events
    sql/            tables, rows, statements, queries
    connections/    SQLite's settings and errors, the write lock
       │
       ▼
    results.py (named outcomes) ─ records.py ─ errors.py

The states and their transitions are in `schema/states.py`. This file imports nothing.
"""
