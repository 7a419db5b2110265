# SPDX-License-Identifier: Apache-2.0
"""Environments of upstream's package whose resets and steps call habits."""

from types import SimpleNamespace
from typing import Any

from habits.habit import Bare, Habit, Told
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import ConfigDict


class Do(Action):
    how: str


class Seen(Observation):
    said: Any = None


class Kept(State):
    model_config = ConfigDict(extra="allow")


def seen(result):
    if isinstance(result, Bare):
        return result.value
    if isinstance(result, Told):
        return Seen(**vars(result))
    return result if isinstance(result, Observation) else Seen(said=result)


class Served(Environment[Do, Seen, Kept]):
    """A session of the habit `ONLY`, or of the habit that its reset names."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    ONLY: Habit | None = None
    HABITS: dict[str, Habit] = {}

    def __init__(self):
        super().__init__()
        self.looked = 0
        self.habit = self.ONLY
        self.own = SimpleNamespace(options={})
        self.call("begin")

    def call(self, how):
        if self.habit and (how in self.habit.also.split() or how in self.habit.steps):
            return self.habit.call(self.own, how)
        return None

    def take(self, seed, habit, options):
        self.habit = self.HABITS.get(habit, self.habit)
        self.own.options = options if seed is None else {**options, "seed": seed}
        return self.call("reset")

    def reset(self, seed=None, episode_id=None, habit="", **options):
        return seen(self.take(seed, habit, options))

    def step(self, action, timeout_s=None, **options):
        if action.how == "look":
            self.looked += 1
            return Seen(said=self.looked)
        return seen(self.call(action.how))

    @property
    def state(self):
        return Kept(step_count=self.looked, **(self.call("state") or {}))

    def close(self):
        self.call("close")


class ServedAsync(Served):
    """The same for habits that are coroutines."""

    async def reset_async(self, seed=None, episode_id=None, habit="", **options):
        result = self.take(seed, habit, options)
        return seen(await result if hasattr(result, "__await__") else result)

    async def step_async(self, action, timeout_s=None, **options):
        result = self.step(action) if action.how == "look" else self.call(action.how)
        return seen(await result if hasattr(result, "__await__") else result)
