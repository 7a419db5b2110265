# SPDX-License-Identifier: Apache-2.0
"""Sockets and HTTP: limits of connections and heads, origins, tokens, WebSocket frames."""
