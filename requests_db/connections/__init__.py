# SPDX-License-Identifier: Apache-2.0
"""Connections to the database's file, and the threads that they run on.

WriteConnection   one connection that writes; the lock of all that do   ◀── dispatcher
                                                                        ◀── AsyncStore
Reader            the API's queries, read-only, on aiosqlite            ◀── AsyncStore

Both are in sqlite.py, with SQLite's settings, and what its errors mean.
"""
