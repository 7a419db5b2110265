# SPDX-License-Identifier: Apache-2.0
"""`McpSocket`: one client on the `/mcp` WebSocket, which speaks bare JSON-RPC in its own session.

It begins, waits and ends as a session on `/ws` does; what differs is what is said.
"""

from __future__ import annotations

from typing import Any

from ..environment.mcp_types import RpcCode, rpc_error
from ..errors import SessionError
from . import messages
from .mcp import encode_response
from .ws_session import SessionSocket


class McpSocket(SessionSocket):
    """One session that speaks JSON-RPC only."""

    path = "/mcp"

    __slots__ = ()

    def begin(self, wanted: str | None) -> None:
        """Begin a new session, whatever the address names."""
        super().begin(None)

    def _take(self, payload: bytes) -> None:
        try:
            data = messages.decode(payload)
        except UnicodeDecodeError:
            self.fail_text()
        except Exception as exc:
            self.send_text(messages.encode(rpc_error(RpcCode.PARSE_ERROR, f"Parse error: {exc}")))
        else:
            self._call_mcp(data)

    def _mcp_text(self, response: dict[str, Any]) -> bytes:
        return encode_response(response)

    def _refuse(self, kind: Any, exc: Exception) -> None:
        self._fail(exc)

    def _last_frame(self, exc: BaseException) -> bytes:
        details = exc.details() if isinstance(exc, SessionError) else None
        text = messages.text_of(exc)
        return messages.encode_error(rpc_error(RpcCode.SERVER_ERROR, text, data=details or None))
