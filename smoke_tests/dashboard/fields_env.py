# SPDX-License-Identifier: Apache-2.0
"""An environment whose action has a field of each kind."""

from typing import Any, Literal

from pydantic import Field

from openenvd import Action, Environment, Observation, State


class Act(Action):
    side: Literal["left", "right"]
    count: int = Field(ge=1, le=9)
    is_last: bool = False
    words: list[str] = Field(default_factory=list)
    note: str | None = None


class Seen(Observation):
    said: str


class Fields(Environment[Act, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self._steps = 0
        return Seen(said=f"seed {seed}, {kwargs}")

    def step(self, action: Act, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        if action.note == "raise":
            raise LookupError("there is no such note")
        self._steps += 1
        said = f"{action.side} {action.count} {action.words} {action.note!r}"
        return Seen(said=said, reward=action.count / 10, done=action.is_last)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)
