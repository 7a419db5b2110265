# SPDX-License-Identifier: Apache-2.0
"""The base classes of an environment that runs without upstream's package.

They have the shape of OpenEnv's (source: upstream 0.10.0, `core/env_server/types.py` and
`interfaces.py`), so that a client sees no difference and a class can move from one to the other
by changing its imports. Bundled environments stand on this module alone.

What the protocol takes from upstream's package: JSON-RPC for MCP, and the form of observations.

Error codes: https://www.jsonrpc.org/specification#error_object

Versions of upstream's package differ in `metadata` of an observation: 0.2.0 to 0.3.1 leave it out,
later ones send it among the observation's fields and beside them. So the installed serializer is
asked once, with a probe.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)


class Action(BaseModel):
    """What a client asks for in a step; unknown fields are refused."""

    model_config = _STRICT

    metadata: dict[str, Any] = Field(default_factory=dict, description="Further data")


class Observation(BaseModel):
    """What an environment answers to a reset or a step; unknown fields are refused."""

    model_config = _STRICT

    done: bool = Field(default=False, description="Whether the episode is over")
    reward: bool | int | float | None = Field(default=None, description="Reward of the action")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Further data")


class State(BaseModel):
    """Where an episode stands; fields may be added freely."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    episode_id: str | None = Field(default=None, description="Which episode this is")
    step_count: int = Field(default=0, ge=0, description="Steps taken in this episode")


class EnvironmentMetadata(BaseModel):
    """What `/metadata` answers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    name: str
    description: str
    readme_content: str | None = None
    version: str | None = None
    author: str | None = None
    documentation_url: str | None = None


ActionT = TypeVar("ActionT", bound=Action)
ObservationT = TypeVar("ObservationT", bound=Observation)
StateT = TypeVar("StateT", bound=State)


class Environment(ABC, Generic[ActionT, ObservationT, StateT]):
    """One episode at a time of something to act in; one instance per session.

    The types of action, observation and state are taken from the class's own type arguments:
    `class Echo(Environment[EchoAction, EchoObservation, State])`.

    Synchronous methods run on a thread that belongs to the session, unless they are quick and may
    run on any; an environment that overrides `reset_async` and `step_async` runs on the event loop.
    """

    SUPPORTS_CONCURRENT_SESSIONS: ClassVar[bool] = False
    REQUIRES_SINGLE_THREAD_EXECUTOR: ClassVar[bool] = False  # all sessions share one thread
    THREAD_SAFE: ClassVar[bool] = False  # calls may run on any thread, one at a time
    RESET_FIRST: ClassVar[bool] = True  # a session's steps are refused before its first reset

    @abstractmethod
    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> ObservationT:
        """Begin an episode and return its first observation."""

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> ObservationT:
        """Override for a reset that awaits; the default calls `reset`."""
        return self.reset(seed=seed, episode_id=episode_id, **kwargs)

    @abstractmethod
    def step(self, action: ActionT, timeout_s: float | None = None, **kwargs: Any) -> ObservationT:
        """Act once and return what is seen."""

    async def step_async(
        self, action: ActionT, timeout_s: float | None = None, **kwargs: Any
    ) -> ObservationT:
        """Override for a step that awaits; the default calls `step`."""
        return self.step(action, timeout_s=timeout_s, **kwargs)

    @property
    @abstractmethod
    def state(self) -> StateT:
        """Where the episode stands."""

    def get_metadata(self) -> EnvironmentMetadata:
        """The metadata of this environment."""
        name = type(self).__name__
        return EnvironmentMetadata(name=name, description=f"{name} environment", version="1.0.0")

    def close(self) -> None:
        """Release what the instance holds; called once, on the session's thread."""


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


def rpc_result(result: Any, request_id: str | int | None) -> dict[str, Any]:
    """A JSON-RPC response that succeeded."""
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def rpc_error(
    code: RpcCode, message: str, request_id: str | int | None = None, data: Any = None
) -> dict[str, Any]:
    """A JSON-RPC response that failed."""
    error = {"code": int(code), "message": message, "data": data}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


class McpTypes:
    """Upstream's classes for tools as actions and observations."""

    def __init__(self, module: Any) -> None:
        self.any_action = module.Action
        self.list_action = module.ListToolsAction
        self.call_action = module.CallToolAction
        self.list_observation = module.ListToolsObservation
        self.call_observation = module.CallToolObservation

    def is_mcp_style(self, action_cls: Any) -> bool:
        """Whether the environment takes tools as its actions."""
        return action_cls in (self.list_action, self.call_action)

    def action_type(self, data: dict[str, Any], action_cls: Any) -> Any:
        """The tool action that `data` is, where the environment's own type leaves room for it."""
        if action_cls is not self.any_action and not self.is_mcp_style(action_cls):
            return None
        kind = data.get("type")
        if kind == "list_tools":
            return self.list_action
        return self.call_action if kind == "call_tool" else None


def upstream_mcp_types() -> McpTypes | None:
    """Upstream's classes, if its package has been imported."""
    module = sys.modules.get(UPSTREAM_MCP_TYPES)
    return None if module is None else McpTypes(module)


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
    """How observations are dumped: by `serialize`, and in one pass where the form is known."""

    serialize: Callable[[Any], dict[str, Any]] = serialize
    has_metadata: bool | None = True  # sent, among the fields and beside them; None: unknown form


def installed_form() -> ObservationForm:
    """Return the form of upstream's package, if it has been imported; otherwise 0.10.0's."""
    module: Any = sys.modules.get(UPSTREAM_SERIALIZATION)
    if module is None:
        return ObservationForm()
    own = module.serialize_observation
    return ObservationForm(own, _has_metadata(own(module.Observation(metadata=_PROBE))))


def _has_metadata(dumped: dict[str, Any]) -> bool | None:
    rest = {"reward": None, "done": False}
    if dumped == {"observation": {"metadata": _PROBE}, "metadata": _PROBE, **rest}:
        return True
    return False if dumped == {"observation": {}, **rest} else None
