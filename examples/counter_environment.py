# SPDX-License-Identifier: Apache-2.0
"""An environment of your own: count to a target without going past it.

openenv launch counter_environment:Counter       in this folder
"""

from __future__ import annotations

from typing import Any

from openenvd import Action, Environment, Observation, State


class CounterAction(Action):
    """How much to add."""

    amount: int


class CounterObservation(Observation):
    """Where the count stands, and where it is to go."""

    count: int = 0
    target: int = 0


class Counter(Environment[CounterAction, CounterObservation, State]):
    """Adds up amounts; an episode ends at the target (reward 1) or beyond it (reward 0)."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State()
        self._count = 0
        self._target = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> CounterObservation:
        """Begin a new episode; the seed decides the target."""
        self._state = State(episode_id=episode_id)
        self._count, self._target = 0, 5 + (seed or 0) % 10
        return CounterObservation(count=0, target=self._target)

    def step(
        self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any
    ) -> CounterObservation:
        """Add the amount."""
        self._state.step_count += 1
        self._count += action.amount
        return CounterObservation(
            count=self._count,
            target=self._target,
            reward=float(self._count == self._target),
            done=self._count >= self._target,
        )

    @property
    def state(self) -> State:
        """The episode's id and the number of its steps."""
        return self._state
