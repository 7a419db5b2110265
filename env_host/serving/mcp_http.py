# SPDX-License-Identifier: Apache-2.0
"""MCP's Streamable HTTP transport on `/mcp`, beside upstream's dialect of bare JSON-RPC.

    POST   initialize ──▶ a session; its id goes into the header Mcp-Session-Id
    POST   with that header ──▶ the session, in whichever process it is; 404 when it is over
    POST   a notification ──▶ 202, no body
    DELETE with that header ──▶ the session ends
    GET    405: the server begins no messages, so it offers no stream

Answers are JSON, never an event stream. A request that has neither is upstream's.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#streamable-http
"""

from __future__ import annotations

from typing import Any

from ..environment.mcp_types import RpcCode, rpc_error
from . import messages
from .http_routes import EncodedReply, Reply
from .mcp import CLOSE, Mcp, encode_response
from .mcp_lifecycle import INITIALIZE, PING, PROTOCOL_VERSIONS, SESSION_ID_KEY

Headers = dict[bytes, bytes]
Json = dict[str, Any]

SESSION_HEADER = b"mcp-session-id"
_PING = {"jsonrpc": "2.0", "method": PING, "id": 0}
_VERSION_HEADER = b"mcp-protocol-version"
_ACCEPTED = ("application/json", "application/*", "*/*")
_EXPOSED = (b"access-control-expose-headers", SESSION_HEADER)  # to web pages that may read it


class McpHttp:
    """Answers HTTP requests to `/mcp`."""

    def __init__(self, mcp: Mcp) -> None:
        self._mcp = mcp

    async def post(self, headers: Headers, body: bytes) -> Reply:
        """Answer a POST."""
        data = _parse(body)
        if data is None:
            return Reply(rpc_error(RpcCode.PARSE_ERROR, "Parse error"))
        session_id = headers.get(SESSION_HEADER, b"").decode("latin-1")
        if session_id or data.get("method") == INITIALIZE:
            if (refusal := _refusal(headers, data)) is not None:
                return refusal
            data = _for_session(data, session_id)
        response = await self._mcp.answer(data)
        if response is None and session_id:  # a notification: whether there is a session tells
            found = await self._mcp.answer(_for_session(_PING, session_id))
        else:
            found = response
        if session_id and _is_unknown(session_id, found):
            return _gone(session_id, data)
        if response is None:
            return EncodedReply(b"", status=202)
        reply = EncodedReply(encode_response(response))
        if data.get("method") == INITIALIZE and "error" not in response:
            new_id = response["result"]["_meta"][SESSION_ID_KEY].encode()
            reply.headers += [(SESSION_HEADER, new_id), _EXPOSED]
        return reply

    async def delete(self, headers: Headers) -> Reply:
        """End a session."""
        session_id = headers[SESSION_HEADER].decode("latin-1")
        close = {"jsonrpc": "2.0", "method": CLOSE, "params": {}, "id": 0}
        response = await self._mcp.answer(_for_session(close, session_id))
        return _gone(session_id, {}) if response is None or "error" in response else Reply({})


def _is_unknown(session_id: str, response: Json | None) -> bool:
    error = (response or {}).get("error") or {}
    return bool(error.get("message") == f"Unknown session_id: {session_id}")


def _parse(body: bytes) -> Json | None:
    try:
        data = messages.decode(body.decode())
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _refusal(headers: Headers, data: Json) -> Reply | None:
    """Refuse what the transport forbids; None when it forbids nothing."""
    accepts = headers.get(b"accept", b"*/*").decode("latin-1").lower()
    if not any(each.partition(";")[0].strip() in _ACCEPTED for each in accepts.split(",")):
        return _refused(406, "Not Acceptable: answers are application/json", data)
    version = headers.get(_VERSION_HEADER, b"").decode("latin-1")
    if version and version not in PROTOCOL_VERSIONS and data.get("method") != INITIALIZE:
        ours = ", ".join(PROTOCOL_VERSIONS)
        return _refused(400, f"Unsupported MCP-Protocol-Version {version!r}; ours: {ours}", data)
    return None


def _refused(status: int, text: str, data: Json) -> Reply:
    return Reply(rpc_error(RpcCode.INVALID_REQUEST, text, _id_of(data)), status)


def _gone(session_id: str, data: Json) -> Reply:
    return _refused(404, f"Session {session_id} is over, or never was; initialize again", data)


def _id_of(data: Json) -> str | int | None:
    found = data.get("id")
    return found if isinstance(found, (str, int)) else None


def _for_session(data: Json, session_id: str) -> Json:
    """Name the session as upstream's dialect does, by which it is found."""
    params = data.get("params", {})
    if not session_id or not isinstance(params, dict):
        return data
    return {**data, "params": {**params, "session_id": session_id}}
