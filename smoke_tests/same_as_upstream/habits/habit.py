# SPDX-License-Identifier: Apache-2.0
"""`habit`: marks one thing that authors of environments do, with what is expected of it.

Each method of a module's class `Habits` is one, called in each step with what the session asks for;
`self` is whatever the session keeps. The docstring is the habit's line in `docs/compatibility.md`.
Habits of a module are served together, each session with the one that its reset names; one that is
`alone` is the whole environment of a project of its own. The modules are imported by the test run
and, as the package `habits`, by both servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SAME = "same"
BETTER = "better: "  # begins the reason
ON_PURPOSE = "on purpose: "  # begins the name of an entry of the table of differences


@dataclass
class Told:
    """An observation with more than `said`."""

    said: Any = None
    reward: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bare:
    """Anything to return in the place of an observation."""

    value: Any


@dataclass
class Habit:
    """One habit, and what is expected."""

    call: Callable[[Any, str], Any]
    steps: tuple[str, ...] = ("go",)  # what the session asks for, one after another
    also: str = (
        ""  # what else it is called with: `begin` (the constructor), `reset`, `state`, `close`
    )
    options: dict[str, Any] = field(default_factory=dict)  # of the reset, found in `self.options`
    resets: bool = True  # before the first step
    posts: tuple[tuple[str, Any], ...] = ()  # paths and bodies of HTTP requests
    alone: bool = False
    at_import: str = ""  # what begins the project's `server/app.py`
    at_end: str = ""  # what ends it
    files: dict[str, str] = field(default_factory=dict)  # more, or others
    ours: str = SAME
    shared: str = ""  # where it is not `ours`
    isolated: str = ""
    docker: str = ""  # where it is not `shared`
    unsteady: bool = False  # upstream's server is not always worse where ours is better

    @property
    def name(self) -> str:
        return self.call.__name__

    @property
    def sentence(self) -> str:
        return (self.call.__doc__ or "").strip()

    def declared(self, way: str) -> str:
        return getattr(self, way) or (self.shared if way == "docker" else "") or self.ours

    @property
    def module(self) -> str:
        return self.call.__module__.rpartition(".")[2]


def habit(**expected: Any) -> Callable[[Any], Habit]:
    """The habit that a method is."""
    return lambda call: Habit(call, **expected)


def habits_in(owner: type) -> Iterator[Habit]:
    """The habits of a class `Habits`; a method without a decorator is one with nothing to say."""
    for name, member in vars(owner).items():
        if isinstance(member, Habit):
            yield member
        elif callable(member) and not name.startswith("_"):
            yield Habit(member)
