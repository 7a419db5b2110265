# SPDX-License-Identifier: Apache-2.0
"""The server's side of a WebSocket; knows no sessions.

handshake.py  the upgrade    frames.py            bytes to messages
protocol.py   a connection   partial_messages.py  what has not arrived whole
"""
