# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server, for every client of ours: SDK, rollouts, tests, probe.

session.py      `Session`: a WebSocket on which one call is under way at a time
connection.py   its socket, and the messages on it
loop_thread.py  the event loops on threads: of synchronous code's sessions, of rollouts

Nothing here imports another part of `rollouts`.
"""
