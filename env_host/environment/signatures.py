# SPDX-License-Identifier: Apache-2.0
"""How an environment wants to be called: async or not, with which keyword arguments.

That is found out once for each class (`Manner`) and each function, not once for each message.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .definition import base_closes, base_methods

UPSTREAM_MCP_ENVIRONMENT = "openenv.core.env_server.mcp_environment"

_accepted: dict[Any, frozenset[str] | None] = {}  # by function; None: it takes any keyword
_manners: dict[type, Manner] = {}


@dataclass(frozen=True, slots=True)
class Manner:
    """How the environments of one class are called."""

    reset_name: str
    reset_is_async: bool
    step_name: str
    step_is_async: bool
    closes: bool  # its `close` does something
    holds_mcp: bool  # it has an MCP connection to be held while its session lasts

    @property
    def is_async(self) -> bool:
        """Whether it needs no thread."""
        return self.reset_is_async and self.step_is_async


class Calls:
    """The methods of one environment instance."""

    __slots__ = ("env", "manner")

    def __init__(self, env: Any) -> None:
        self.env = env
        self.manner = manner_of(env)

    @property
    def reset(self) -> Callable[..., Any]:
        """`reset_async` where a subclass defines it, otherwise `reset`."""
        method: Callable[..., Any] = getattr(self.env, self.manner.reset_name)
        return method

    @property
    def step(self) -> Callable[..., Any]:
        """`step_async` where a subclass defines it, otherwise `step`."""
        method: Callable[..., Any] = getattr(self.env, self.manner.step_name)
        return method

    @property
    def reset_is_async(self) -> bool:
        """Whether `reset` is to be awaited."""
        return self.manner.reset_is_async

    @property
    def step_is_async(self) -> bool:
        """Whether `step` is to be awaited."""
        return self.manner.step_is_async

    @property
    def state_is_threaded(self) -> bool:
        """Whether `state` belongs on the session's thread, as the synchronous step does."""
        return not self.manner.step_is_async

    def read_state(self) -> dict[str, Any]:
        """The state as plain data."""
        state = self.env.state
        if hasattr(state, "model_dump"):
            dumped: dict[str, Any] = state.model_dump()
            return dumped
        return dict(state) if state else {}


def manner_of(env: Any) -> Manner:
    """How `env` is called; remembered for its class, unless the instance has methods of its own."""
    env_class = type(env)
    if not _OVERRIDABLE.isdisjoint(getattr(env, "__dict__", ())):
        return _find_manner(env)
    manner = _manners.get(env_class)
    if manner is None:
        manner = _manners[env_class] = _find_manner(env)
    return manner


def keep_accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that `function` takes; OpenEnv drops the others silently."""
    if not arguments:
        return arguments
    accepted = _accepted_names(function)
    if accepted is None:
        return arguments
    return {name: value for name, value in arguments.items() if name in accepted}


def serialize(observation: Any) -> dict[str, Any]:
    """The `data` of an observation frame: fields, and `reward`, `done`, `metadata` beside them."""
    data = {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": observation.reward,
        "done": observation.done,
    }
    if observation.metadata:
        data["metadata"] = observation.metadata
    return data


_OVERRIDABLE = frozenset({"reset", "reset_async", "step", "step_async", "close", "mcp_session"})


def _find_manner(env: Any) -> Manner:
    inherited = base_methods()
    reset_name, reset_is_async = _pick(env, "reset", inherited)
    step_name, step_is_async = _pick(env, "step", inherited)
    close = getattr(env, "close", None)
    return Manner(
        reset_name=reset_name,
        reset_is_async=reset_is_async,
        step_name=step_name,
        step_is_async=step_is_async,
        closes=close is not None and getattr(close, "__func__", close) not in base_closes(),
        holds_mcp=_holds_mcp(env, inherited),
    )


def _holds_mcp(env: Any, inherited: frozenset[Any]) -> bool:
    """Whether its MCP connection can be held on the session's loop.

    `MCPEnvironment` before 0.2.3 has no `step_async`: its `step` waits for its tools on a loop in
    another thread. A connection that is held here never answers there, and where a subclass's
    `step_async` calls that `step`, the whole shard stands still. Each of its calls opens its own.
    """
    if not callable(getattr(env, "mcp_session", None)):
        return False
    upstream: Any = sys.modules.get(UPSTREAM_MCP_ENVIRONMENT)
    return (
        upstream is None
        or not isinstance(env, upstream.MCPEnvironment)
        or upstream.MCPEnvironment.step_async not in inherited
    )


def _pick(env: Any, name: str, inherited: frozenset[Any]) -> tuple[str, bool]:
    """The async method where a subclass defines it, otherwise the plain one (maybe async too)."""
    method = getattr(env, f"{name}_async", None)
    if method is not None and getattr(method, "__func__", method) not in inherited:
        return f"{name}_async", True
    return name, inspect.iscoroutinefunction(getattr(env, name))


def _accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    key = getattr(function, "__func__", function)
    if key not in _accepted:
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        _accepted[key] = None if takes_any else frozenset(parameters)
    return _accepted[key]
