# SPDX-License-Identifier: Apache-2.0
"""Stores requests and their states: the tables, the transitions, the queue; all SQL.

    open_database(path) ──▶ a database at this code's version          connections.py
    WriteConnection  the dispatcher's thread: claim, record, recover   connections.py
    AsyncStore       the API's loop: submit, cancel, list, observe     async_store.py
       │
       ▼
    transactions/   submitting, dispatching, retention, observing; the journal of events
    sql/            tables, rows, statements, queries
    connections.py  SQLite's settings and errors, the write lock
       │
       ▼
    records.py (rows, named outcomes) ─ errors.py

The states and their transitions are in `schema/states.py`. This file imports nothing.
"""
