# SPDX-License-Identifier: Apache-2.0
"""Policies: anything that can be called with an observation and returns an action.

    Policy ─player()─▶ Player, one for each attempt at an episode ─▶ act(answer, turn) ─▶ Encoded
      ├── CallablePolicy     here
      ├── RandomPolicy       random_policy.py
      └── ChatPolicy         chat_policy.py

A class is a policy with a memory: each episode gets an instance of its own. One that takes two
arguments also gets the `Turn`. It returns an action, or a `Decision` that says more.

Coroutine functions run on the loop, all others in `CpuThreads`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import orjson

from ..answers import PARSED_APART_BYTES, Answer
from ..episodes import Array, BytesLike, FailureReason
from ..errors import EpisodeFailed, PolicyHangs
from .cpu_threads import CpuThreads


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy gets besides the observation."""

    episode_id: str
    number: int  # of the step it decides on, from 0
    seed: int | None
    reward: float | None  # of the step before


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, with `info` and `arrays` that are written with the step."""

    action: Any
    info: Mapping[str, Any] = field(default_factory=dict)  # log-probabilities, token ids, …
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A decision as it is sent and kept."""

    action_json: bytes
    info_json: bytes
    arrays: Mapping[str, Array]


class Player(Protocol):
    """A policy during one episode."""

    async def act(self, answer: Answer, turn: Turn) -> Encoded:
        """Returns the next action."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Decides on actions, through a `Player` for each attempt at an episode."""

    def player(self, threads: CpuThreads) -> Player:
        """Makes the player of one attempt, which may compute in `threads`."""
        ...

    async def close(self) -> None:
        """Closes connections of the policy; called when a collection ends."""
        ...


@dataclass(frozen=True, slots=True)
class CallablePolicy:
    """A function, coroutine function, or class of which each episode gets an instance."""

    function: Any

    def player(self, threads: CpuThreads) -> Player:
        """A fresh one."""
        function = self.function() if inspect.isclass(self.function) else self.function
        return _CallablePlayer(function, threads)

    async def close(self) -> None:
        """There is nothing to close."""


class _CallablePlayer:
    def __init__(self, function: Any, threads: CpuThreads) -> None:
        self._function = function
        self._threads = threads
        self._wants_turn = takes_turn(function)
        self._is_async = is_async(function)

    async def act(self, answer: Answer, turn: Turn) -> Encoded:
        try:
            if self._is_async:
                return await self._act_on_loop(answer, turn)
            decided = await self._threads.run(lambda: self._decided(answer, turn))
            return decided if isinstance(decided, Encoded) else encoded(await decided)
        except (EpisodeFailed, PolicyHangs):
            raise
        except (Exception, SystemExit) as exc:  # let through, `sys.exit()` would end the loop
            raise policy_failed(exc) from exc

    def _decided(self, answer: Answer, turn: Turn) -> Encoded | Awaitable[Any]:
        """Calls the function on a thread.

        An awaitable that it returns (`lambda seen: client.act(seen)`) is awaited on the loop.
        """
        decided = self._call(answer.observation, turn)
        return decided if inspect.isawaitable(decided) else encoded(decided)

    async def _act_on_loop(self, answer: Answer, turn: Turn) -> Encoded:
        is_large = len(answer.observation_json) > PARSED_APART_BYTES
        told = lambda: answer.observation  # noqa: E731  # parsed where it is called
        observation = await self._threads.run(told) if is_large else answer.observation
        return encoded(await self._call(observation, turn))

    def _call(self, observation: Any, turn: Turn) -> Any:
        if self._wants_turn:
            return self._function(observation, turn)
        return self._function(observation)


def encoded(decided: Any) -> Encoded:
    """An action or a `Decision` as JSON.

    Raises:
        TypeError, ValueError: it has no JSON form, or an array is none.
    """
    if not isinstance(decided, Decision):
        decided = Decision(decided)
    action = (
        decided.action.model_dump() if hasattr(decided.action, "model_dump") else decided.action
    )
    options = orjson.OPT_SERIALIZE_NUMPY
    return Encoded(
        orjson.dumps(action, option=options),
        orjson.dumps(dict(decided.info), option=options) if decided.info else b"{}",
        {name: _checked(name, array) for name, array in decided.arrays.items()},
    )


def _checked(name: str, array: Any) -> Array:
    """An array that can be written as it is."""
    if not isinstance(array, Array):
        raise TypeError(f"the array {name!r} is of type {type(array).__name__}, not an Array")
    data: Any = array.data  # whatever a policy has put there
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError(f"the data of the array {name!r} is not contiguous")
    if isinstance(data, BytesLike):
        return array
    return Array(view.cast("B"), array.dtype, array.shape)


def is_async(function: Any) -> bool:
    """Whether calling it gives an awaitable."""
    call = getattr(function, "__call__", None)  # noqa: B004  # an instance with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def takes_turn(function: Any) -> bool:
    """Whether it takes a second argument by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in by_position if p.default is p.empty]
    is_open = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len(required) >= 2 or is_open or any(p.name == "turn" for p in by_position[1:])


def policy_failed(exc: BaseException) -> EpisodeFailed:
    """The failure of an episode whose policy raised `exc`."""
    return EpisodeFailed(FailureReason.POLICY_ERROR, f"{type(exc).__name__}: {exc}")
