# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server, for all our clients: SDK, rollouts, tests, probe.

session.py      `Session`: a WebSocket on which one call is under way at a time
connection.py   the socket and its messages
loop_thread.py  event loops on threads, for synchronous code's sessions and for rollouts

Nothing here imports another part of `rollouts`.
"""
