# SPDX-License-Identifier: Apache-2.0
"""How one environment instance wants to be called: async or not, with which keyword arguments.

Signatures are inspected once per function, not once per message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .definition import base_methods

_accepted: dict[Any, frozenset[str] | None] = {}  # by function; None: it takes any keyword


class Calls:
    """The methods of one environment instance, looked up once."""

    __slots__ = ("env", "reset", "reset_is_async", "step", "step_is_async")

    def __init__(self, env: Any) -> None:
        self.env = env
        inherited = base_methods()
        self.reset, self.reset_is_async = _pick(env, "reset", inherited)
        self.step, self.step_is_async = _pick(env, "step", inherited)

    @property
    def state_is_threaded(self) -> bool:
        """Whether `state` belongs on the session's thread, as the synchronous step does."""
        return not self.step_is_async

    def read_state(self) -> dict[str, Any]:
        """The state as plain data."""
        state = self.env.state
        if hasattr(state, "model_dump"):
            dumped: dict[str, Any] = state.model_dump()
            return dumped
        return dict(state) if state else {}


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


def _pick(env: Any, name: str, inherited: frozenset[Any]) -> tuple[Callable[..., Any], bool]:
    """The async method where a subclass defines it, otherwise the plain one (maybe async too)."""
    method = getattr(env, f"{name}_async", None)
    if method is not None and getattr(method, "__func__", method) not in inherited:
        return method, True
    plain = getattr(env, name)
    return plain, inspect.iscoroutinefunction(plain)


def _accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    key = getattr(function, "__func__", function)
    if key not in _accepted:
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        _accepted[key] = None if takes_any else frozenset(parameters)
    return _accepted[key]
