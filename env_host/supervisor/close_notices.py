# SPDX-License-Identifier: Apache-2.0
"""What the host says to clients whose process has died, in their protocol: one error, then the end.

Written to the bare socket. Should the dead process have left half a frame there, what we write
lands inside it, and the client sees a connection that broke off, as it would have anyway.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct

from ...system.exit_status import exit_sentence
from ..protocol import WSErrorCode

INTERNAL_ERROR_CLOSE = 1011
MAX_CLOSE_REASON_BYTES = 123
_RPC_SERVER_ERROR = -32000
_TEXT, _CLOSE = 0x81, 0x88  # each frame is whole


def say(fd: int, path: str, text: str) -> None:
    """Tell the client of a session why it has ended; closes the descriptor."""
    frame = _frame(_TEXT, _message(path, text).encode())
    reason = struct.pack("!H", INTERNAL_ERROR_CLOSE) + _cut(text).encode()
    _write(fd, frame + _frame(_CLOSE, reason[: MAX_CLOSE_REASON_BYTES + 2]))


def say_before_handshake(fd: int, text: str) -> None:
    """Tell a client whose handshake nobody has answered; closes the descriptor."""
    body = json.dumps({"detail": text}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    _write(fd, head.encode() + body)


def how_it_died(wait_status: int, *, out_of_memory: str | None = None) -> str:
    """For people: `was killed by SIGKILL`."""
    if out_of_memory is not None:
        return out_of_memory
    return exit_sentence(wait_status)


def _message(path: str, text: str) -> str:
    if path == "/mcp":
        error = {"code": _RPC_SERVER_ERROR, "message": text}
        return json.dumps({"jsonrpc": "2.0", "error": error, "id": None})
    data = {"message": text, "code": WSErrorCode.SESSION_ERROR}
    return json.dumps({"type": "error", "data": data})


def _frame(kind: int, payload: bytes) -> bytes:
    size = len(payload)
    length = bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size)
    return bytes([kind]) + length + payload


def _cut(text: str) -> str:
    """As much of it as a close frame holds."""
    return text.encode()[: MAX_CLOSE_REASON_BYTES - 3].decode(errors="ignore")


def _write(fd: int, data: bytes) -> None:
    """Best effort, without waiting: a client that does not read may miss its last word."""
    connection = socket.socket(fileno=fd)
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(data)
        connection.shutdown(socket.SHUT_WR)
