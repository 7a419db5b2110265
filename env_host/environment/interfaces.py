# SPDX-License-Identifier: Apache-2.0
"""The base classes of an environment that runs without upstream's package.

They have the shape of OpenEnv's (source: upstream 0.10.0, `core/env_server/types.py` and
`interfaces.py`), so that a client sees no difference and a class can move from one to the other
by changing its imports. Bundled environments stand on this module alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)


class Action(BaseModel):
    """The action of a step; unknown fields are refused."""

    model_config = _STRICT

    metadata: dict[str, Any] = Field(default_factory=dict, description="Further data")


class Observation(BaseModel):
    """The answer of an environment to a reset or a step; unknown fields are refused."""

    model_config = _STRICT

    done: bool = Field(default=False, description="Whether the episode is over")
    reward: bool | int | float | None = Field(default=None, description="Reward of the action")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Further data")


class State(BaseModel):
    """The state of an episode; fields may be added freely."""

    model_config = ConfigDict(extra="allow", validate_assignment=True, arbitrary_types_allowed=True)

    episode_id: str | None = Field(default=None, description="Which episode this is")
    step_count: int = Field(default=0, ge=0, description="Steps taken in this episode")


class EnvironmentMetadata(BaseModel):
    """The answer of `/metadata`."""

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
    BRANCH: ClassVar[str] = ""  # "copy": `copy.deepcopy` copies all of an instance's state

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
        """Return where the episode stands."""

    def get_metadata(self) -> EnvironmentMetadata:
        """The metadata of this environment."""
        name = type(self).__name__
        return EnvironmentMetadata(name=name, description=f"{name} environment", version="1.0.0")

    def close(self) -> None:
        """Release what the instance holds; called once, on the session's thread."""
