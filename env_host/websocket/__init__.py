# SPDX-License-Identifier: Apache-2.0
"""The WebSocket protocol: handshake, frames, connection state. Knows no sessions."""
