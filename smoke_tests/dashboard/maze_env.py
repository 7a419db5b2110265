# SPDX-License-Identifier: Apache-2.0
"""An environment with something to see: a walk through a room, as a picture and in numbers."""

import random
from typing import Any, Literal

from openenvd import Action, Environment, Observation, State

SIDE = 12
CELL = 6  # pixels
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WALL, FLOOR, GOAL, WALKER = (55, 65, 81), (226, 232, 240), (22, 163, 74), (220, 38, 38)


class Walk(Action):
    direction: Literal["left", "right", "up", "down"]


class Room(Observation):
    screen: list[list[list[int]]]
    position: list[int]
    goal: list[int]


class Maze(Environment[Walk, Room, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._steps = 0
        self._walls: set[tuple[int, int]] = set()
        self._at = self._goal = (0, 0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Room:
        self._random.seed(seed)
        self._steps = 0
        self._at, self._goal = (2, 6), (self._random.randrange(5, SIDE - 1), 6)
        between = [(x, y) for x in range(4, SIDE - 1) for y in (2, 4, 8, 10)]
        self._walls = set(self._random.sample(between, 12))
        return self._seen(0.0)

    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> Room:
        self._steps += 1
        before = self._distance()
        x, y = (a + b for a, b in zip(self._at, STEPS[action.direction], strict=True))
        if 0 < x < SIDE - 1 and 0 < y < SIDE - 1 and (x, y) not in self._walls:
            self._at = (x, y)
        return self._seen(float(before - self._distance()) + 5 * (self._at == self._goal))

    @property
    def state(self) -> State:
        return State(step_count=self._steps)

    def _distance(self) -> int:
        return sum(abs(a - b) for a, b in zip(self._at, self._goal, strict=True))

    def _seen(self, reward: float) -> Room:
        rows = [[self._color(x, y) for x in range(SIDE)] for y in range(SIDE)]
        screen = [[list(c) for c in row for _ in range(CELL)] for row in rows for _ in range(CELL)]
        is_there = self._at == self._goal
        return Room(
            screen=screen,
            position=list(self._at),
            goal=list(self._goal),
            reward=reward,
            done=is_there,
        )

    def _color(self, x: int, y: int) -> tuple[int, int, int]:
        if (x, y) == self._at:
            return WALKER
        if (x, y) == self._goal:
            return GOAL
        is_wall = not (0 < x < SIDE - 1 and 0 < y < SIDE - 1) or (x, y) in self._walls
        return WALL if is_wall else FLOOR
