# SPDX-License-Identifier: Apache-2.0
"""The server's side of a WebSocket; knows no sessions.

handshake.py  the upgrade
frames.py     bytes to messages, and a bound for incomplete messages
protocol.py   a connection
"""
