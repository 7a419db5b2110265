# SPDX-License-Identifier: Apache-2.0
"""MCP as its specification has it: the handshake, and the forms of tools and of their results.

A session whose client has sent `initialize` gets these forms; all others get upstream's dialect,
which knows no handshake and answers a tool's bare result. Server features other than tools, and
messages that the server would begin, are not offered.

https://modelcontextprotocol.io/specification/2025-11-25/basic/lifecycle
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from .messages import encode

Json = dict[str, Any]

INITIALIZE = "initialize"
PING = "ping"
NOTIFICATIONS = "notifications/"  # their methods begin with it
PROTOCOL_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
SESSION_ID_KEY = "openenv/session_id"  # of the `_meta` of the answer to `initialize`


def initialize_result(
    name: str, version: str, session_id: str, asked: Any, *, has_tools: bool
) -> Json:
    """Return the answer to `initialize`: the version asked for, if it is one of ours.

    Args:
        name: The environment's.
        version: The environment's.
        session_id: What further requests must carry.
        asked: The `protocolVersion` of the client.
        has_tools: Whether the environment has tools at all.
    """
    return {
        "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[-1],
        "capabilities": {"tools": {"listChanged": False}} if has_tools else {},
        "serverInfo": {"name": name, "version": version},
        "_meta": {SESSION_ID_KEY: session_id},
    }


def tool_form(tool: Any) -> Json:
    """Return the `Tool` of an SDK's or upstream's description."""
    described = _dump(tool) if isinstance(tool, BaseModel) else dict(tool)
    schema = described.pop("input_schema", None) or described.get("inputSchema") or {}
    return {**described, "inputSchema": {"type": "object", **schema}}


def result_form(value: Any) -> Json:
    """Return the `CallToolResult` of what a tool returned: an SDK's result, or any value."""
    content = _get(value, "content")
    if isinstance(content, list) and all(map(_is_block, content)):
        structured = _get(value, "structured_content", "structuredContent")
        is_error = bool(_get(value, "is_error", "isError"))
        blocks = [_dump(each) if isinstance(each, BaseModel) else each for each in content]
        return _result(blocks, structured, is_error=is_error)
    text = value if isinstance(value, str) else encode_plain(value)
    return _result([{"type": "text", "text": text}], value, is_error=False)


def error_form(text: str) -> Json:
    """Return the `CallToolResult` of a tool that failed."""
    return _result([{"type": "text", "text": text}], None, is_error=True)


def encode_plain(value: Any) -> str:
    """Write any value as JSON text."""
    try:
        return encode(value).decode()
    except ValueError:
        return json.dumps(value, default=str)


def _result(content: list[Any], structured: Any, *, is_error: bool) -> Json:
    result: Json = {"content": content, "isError": is_error}
    return result | {"structuredContent": structured} if isinstance(structured, dict) else result


def _is_block(value: Any) -> bool:
    return isinstance(value, BaseModel) or (isinstance(value, dict) and "type" in value)


def _get(value: Any, *names: str) -> Any:
    for name in names:
        found = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        if found is not None:
            return found
    return None


def _dump(model: BaseModel) -> Json:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)
