# SPDX-License-Identifier: Apache-2.0
"""Observations, rewards and states: large, deep, not finite, not JSON."""

import collections
import datetime as dt
import enum
import uuid
from dataclasses import dataclass

from .habit import Bare, Told, habit


@dataclass
class Point:
    """Plain data."""

    x: int
    y: tuple[int, ...] = (1,)


class Habits:
    def large_text(self, how):
        """5 MB of text."""
        return "0123456789" * 500000

    @habit(steps=("200", "5000"))
    def deep_nesting(self, how):
        """Lists in lists, 200 and 5,000 deep."""
        nested = "bottom"
        for _ in range(int(how)):
            nested = [nested]
        return nested

    def not_finite(self, how):
        """NaN and infinities."""
        return {"nan": float("nan"), "inf": [float("inf"), -float("inf")]}

    @habit(steps=("nan", "inf", "-inf"))
    def not_finite_reward(self, how):
        """A reward that is NaN, and one that is infinite."""
        return Told(how, reward=float(how))

    def text_as_reward(self, how):
        """A reward that is text, which the type refuses."""
        return Told(how, reward="high")

    def binary_bytes(self, how):
        """Bytes that are no text, as a picture's."""
        return {"png": b"\x89PNG\r\n\x1a\n\xff\xfe"}

    def collections(self, how):
        """Tuples, sets, deques and counters."""
        point = collections.namedtuple("point", "x y")(1, 2)
        queue = collections.deque([1, 2], maxlen=3)
        kinds = [(1, "a"), {5}, frozenset({6}), point, queue, range(3)]
        return [*kinds, collections.Counter("aab"), collections.OrderedDict(b=1, a=2)]

    def lazy(self, how):
        """A generator, and a dictionary's view."""
        return {"generator": (number for number in range(3)), "keys": {"a": 1}.keys()}

    def values(self, how):
        """Dates, UUIDs, enumerations and dataclasses."""
        colour = enum.Enum("colour", "RED GREEN")
        number = enum.IntEnum("number", "ONE TWO")
        now = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
        values = [now, now.date(), dt.timedelta(hours=1), Point(1), {"points": [Point(2, (3, 4))]}]
        return [*values, uuid.UUID(int=7), colour.RED, number.TWO, 1 + 2j]

    def other_keys(self, how):
        """A dictionary whose keys are numbers, None and booleans."""
        return {1: "one", 2.5: "half", None: "nothing"}

    def tuple_keys(self, how):
        """A dictionary whose keys are tuples, as boards have them."""
        return {(0, 1): "X"}

    def half_surrogate(self, how):
        """Half a surrogate pair, as from a file name."""
        return "broken \ud800 text"

    def odd_text(self, how):
        """NUL, control characters, emoji and separators of lines."""
        return {"\x00key": "\x00 \x1b[31m \u2028 \u202e 😀 \ufeff é", "": ""}

    def huge_integers(self, how):
        """Integers beyond 64 bits."""
        return [2**63, -(2**64), 2**200]

    def cycle(self, how):
        """An observation that contains itself."""
        board = [1]
        board.append(board)
        return board

    @habit(steps=("dictionary", "none"))
    def no_observation(self, how):
        """Steps that return a dictionary, and None, instead of an observation."""
        return Bare({"said": how, "reward": 1.0, "done": False} if how != "none" else None)

    def metadata(self, how):
        """Metadata."""
        return Told("see there", metadata={"lives": 3, "note": None, "path": [1, 2]})

    @habit(steps=("a", "b", "c"), also="reset")
    def same_object(self, how):
        """Each step returns the same list, grown by one."""
        if how == "reset":
            self.history: list[str] = []
        self.history.append(how)
        return self.history

    @habit(also="state")
    def state_of_its_own(self, how):
        """A state with fields of its own."""
        if how == "state":
            return {"score": 1.5, "board": [[0, 1], [1, 0]], "none": None}
        return how

    @habit(also="state")
    def state_that_fails(self, how):
        """A state that raises."""
        if how == "state":
            raise RuntimeError("no state yet")
        return how

    @habit(options={"seed": 7, "task": {"level": [1, 2]}, "difficulty": "hard"}, also="reset")
    def reset_options(self, how):
        """A reset with a seed and options, one of them nested."""
        return self.options
