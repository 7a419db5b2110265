# SPDX-License-Identifier: Apache-2.0
"""An environment that says whose it is, which world this is, and how many steps that has had."""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

TAKE_BYTES = 10_000_000


class WorldObservation(Observation):
    """Whose it is, as the launch has named it, and where the episode stands."""

    whose: str
    world: str
    steps: int


class WorldEnvironment(Environment[Action, WorldObservation, State]):
    """A world of its own for each session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._world = uuid4().hex
        self._steps = 0
        self._taken: list[bytes] = []

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> WorldObservation:
        self._world = uuid4().hex
        self._steps = 0
        return self._seen()

    def step(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> WorldObservation:
        """Count, or take memory until this process is killed."""
        while action.metadata.get("take_memory"):
            self._taken.append(b"m" * TAKE_BYTES)
        self._steps += 1
        return self._seen()

    @property
    def state(self) -> State:
        return State(episode_id=self._world, step_count=self._steps)

    def _seen(self) -> WorldObservation:
        return WorldObservation(whose=os.environ["WHOSE"], world=self._world, steps=self._steps)
