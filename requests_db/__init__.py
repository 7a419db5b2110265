# SPDX-License-Identifier: Apache-2.0
"""What a request is and where it stands: the tables, the transitions, the queue; all SQL.

    open_database(path) ──▶ a database at this code's version          migrate.py
    DispatchStore  the dispatcher's thread: claim, record, recover     store.py
    AsyncStore     the API's loop: submit, cancel, look, observe       async_store.py
       │
       ▼  both speak in named outcomes                                 results.py
    submitting, dispatching, recovery, retention, observing, queries   functions over a connection
       │
       ▼
    statements.py (SQL, built once) ─ rows.py ─ tables.py ─ journal.py (events and tallies)
       │
       ▼
    connections.py (threads and locks) ─ dialect.py (all that is true of SQLite alone)

The CLI imports `states` from here, so this file stays empty of imports that need SQLAlchemy.
"""
