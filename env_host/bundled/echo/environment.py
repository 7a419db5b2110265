# SPDX-License-Identifier: Apache-2.0
"""`echo`: answers every message with the same message; the smallest environment there is."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pydantic import Field

from ...environment.interfaces import Action, Environment, Observation, State

_REWARD_PER_CHARACTER = 0.1
_MAX_REWARD = 1.0


class EchoAction(Action):
    """A message to send back."""

    message: str = Field(description="Text to send back")


class EchoObservation(Observation):
    """The message that was sent, and its length."""

    echoed_message: str = Field(default="", description="Text of the action")
    message_length: int = Field(default=0, description="Its length in characters")


class EchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    """Answers each message with the same message, and counts them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id=str(uuid4()))

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> EchoObservation:
        """Begin a new episode; `seed` changes nothing here."""
        self._state = State(episode_id=episode_id or str(uuid4()))
        return EchoObservation(echoed_message="Ready to echo.", reward=0.0)

    def step(
        self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any
    ) -> EchoObservation:
        """Return `action.message`; longer messages earn more, up to 1.0."""
        self._state.step_count += 1
        message = action.message
        return EchoObservation(
            echoed_message=message,
            message_length=len(message),
            reward=min(len(message) * _REWARD_PER_CHARACTER, _MAX_REWARD),
            metadata={"original_message": message, "step": self._state.step_count},
        )

    @property
    def state(self) -> State:
        """The episode's id and the number of steps taken in it."""
        return self._state
