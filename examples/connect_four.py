# SPDX-License-Identifier: Apache-2.0
"""Connect four on a board of five by five, against an opponent that drops its pieces at random.

openenv launch connect_four:ConnectFour       in this folder
"""

from __future__ import annotations

import random
from typing import Any

from openenvd import Action, Environment, Observation, State

SIZE = 5
PLAYER, OPPONENT = 1, -1


class Drop(Action):
    """The column of the next piece, from 0."""

    column: int


class Board(Observation):
    """The cells by column, from below; `winner` is 1 for the player, -1 for the opponent."""

    columns: list[list[int]]
    winner: int = 0


class ConnectFour(Environment[Drop, Board, State]):
    """The opponent begins; a won game has reward 1, a drawn one 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State()
        self._rng = random.Random()  # noqa: S311  # a game is no secret
        self._columns: list[list[int]] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        """Begin a game; the seed decides what the opponent does."""
        self._state = State(episode_id=episode_id)
        self._rng = random.Random(seed)  # noqa: S311
        self._columns = [[] for _ in range(SIZE)]
        return self._seen(self._answer())

    def step(self, action: Drop, timeout_s: float | None = None, **kwargs: Any) -> Board:
        """Drop a piece, and let the opponent drop one."""
        self._state.step_count += 1
        if action.column not in free_columns(self._columns):
            raise ValueError(f"column {action.column} is full, or not on the board")
        self._columns[action.column].append(PLAYER)
        winner = PLAYER if has_four(self._columns, action.column) else self._answer()
        return self._seen(winner)

    @property
    def state(self) -> State:
        """The episode's id and the number of its steps."""
        return self._state

    def _answer(self) -> int:
        """Drop a piece of the opponent, and return the winner if it is that."""
        if not (free := free_columns(self._columns)):
            return 0
        column = self._rng.choice(free)
        self._columns[column].append(OPPONENT)
        return OPPONENT if has_four(self._columns, column) else 0

    def _seen(self, winner: int) -> Board:
        is_full = not free_columns(self._columns)
        reward = 1.0 if winner == PLAYER else 0.5 * (is_full and not winner)
        done = bool(winner) or is_full
        return Board(columns=self._columns, winner=winner, reward=reward, done=done)


def free_columns(columns: list[list[int]]) -> list[int]:
    """Return the columns that are not full."""
    return [number for number, column in enumerate(columns) if len(column) < SIZE]


def has_four(columns: list[list[int]], column: int) -> bool:
    """Return whether the top piece of a column is one of four in a line."""
    row = len(columns[column]) - 1
    own = columns[column][row]

    def is_own(x: int, y: int) -> bool:
        return 0 <= x < SIZE and 0 <= y < len(columns[x]) and columns[x][y] == own

    for dx, dy in ((1, 0), (0, 1), (1, 1), (1, -1)):
        count = 1
        for sign in (1, -1):
            x, y = column + sign * dx, row + sign * dy
            while is_own(x, y):
                count, x, y = count + 1, x + sign * dx, y + sign * dy
        if count >= 4:
            return True
    return False
