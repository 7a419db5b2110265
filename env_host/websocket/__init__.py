# SPDX-License-Identifier: Apache-2.0
"""The server's side of a WebSocket; knows no sessions.

handshake.py  the upgrade
frames.py     bytes to messages, and what of them has not arrived whole
protocol.py   a connection
"""
