# SPDX-License-Identifier: Apache-2.0
"""Connections to the database's file, and the threads that they run on.

write_connection.py   one connection that writes; the lock of all that do   ◀── dispatcher
                                                                            ◀── AsyncStore
reader.py             the API's queries, read-only, on aiosqlite            ◀── AsyncStore
sqlite.py             SQLite's settings, and what its errors mean
"""
