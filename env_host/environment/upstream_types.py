# SPDX-License-Identifier: Apache-2.0
"""Types of upstream's package that the protocol needs: JSON-RPC for MCP, forms of observations.

Error codes: https://www.jsonrpc.org/specification#error_object

Versions of upstream's package differ in `metadata` of an observation: 0.2.0 to 0.3.1 leave it out,
later ones send it among the observation's fields and beside them. So the installed serializer is
asked once, with a probe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

UPSTREAM_MCP_TYPES = "openenv.core.env_server.mcp_types"
UPSTREAM_SERIALIZATION = "openenv.core.env_server.serialization"
_PROBE = {"probe": True}


class RpcCode(IntEnum):
    """The `code` of a JSON-RPC error."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    SERVER_ERROR = -32000


class JsonRpcRequest(BaseModel):
    """One JSON-RPC request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


def rpc_error(
    code: RpcCode, message: str, request_id: str | int | None = None, data: Any = None
) -> dict[str, Any]:
    """A JSON-RPC response that failed."""
    error = {"code": int(code), "message": message, "data": data}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def upstream_mcp_types() -> Any:
    """Upstream's classes for tools as actions and observations, if its package was imported."""
    return sys.modules.get(UPSTREAM_MCP_TYPES)


def takes_tools(types: Any, action_cls: Any) -> bool:
    """Return whether an environment takes tools as its actions."""
    return types is not None and action_cls in (types.ListToolsAction, types.CallToolAction)


def action_type(types: Any, data: dict[str, Any], action_cls: Any) -> Any:
    """Return the type of the tool action in `data`, if the environment's own type allows it."""
    if action_cls is not types.Action and not takes_tools(types, action_cls):
        return None
    kind = data.get("type")
    if kind == "list_tools":
        return types.ListToolsAction
    return types.CallToolAction if kind == "call_tool" else None


def serialize(observation: Any) -> dict[str, Any]:
    """Dump an observation as upstream 0.10.0 does: its fields, and three of them beside them."""
    data = {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": observation.reward,
        "done": observation.done,
    }
    if observation.metadata:
        data["metadata"] = observation.metadata
    return data


@dataclass(frozen=True, slots=True)
class ObservationForm:
    """The form in which observations are dumped: by `serialize`, in one pass if it is known."""

    serialize: Callable[[Any], dict[str, Any]] = serialize
    has_metadata: bool | None = True  # sent, among the fields and beside them; None: unknown form


def installed_form() -> ObservationForm:
    """Return the form of upstream's package, if it has been imported; otherwise 0.10.0's."""
    module: Any = sys.modules.get(UPSTREAM_SERIALIZATION)
    if module is None:
        return ObservationForm()
    own, rest = module.serialize_observation, {"reward": None, "done": False}
    dumped = own(module.Observation(metadata=_PROBE))
    if dumped == {"observation": {"metadata": _PROBE}, "metadata": _PROBE, **rest}:
        return ObservationForm(own)
    return ObservationForm(own, False if dumped == {"observation": {}, **rest} else None)
