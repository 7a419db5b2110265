# SPDX-License-Identifier: Apache-2.0
"""The processes that serve sessions: they take connections, and route each to where it belongs.

shard.py        a shard: connections, sessions, and its life
session_process.py  the process of an isolated session
connections.py  connections whose first request is being read; tells the supervisor which sockets
                have sessions
admission.py    which connection gets the next slot
"""
