# SPDX-License-Identifier: Apache-2.0
"""`habit`: marks one thing that authors of environments do, with the expected outcome.

Each method of a module's class `Habits` is one, called in each step with what the session asks for;
`self` is whatever the session keeps. The docstring is the habit's line in `docs/compatibility.md`.
Habits of a module are served together, each session with the one that its reset names; one that is
`alone` is the whole environment of a project of its own. The modules are imported by the test run
and, as the package `habits`, by both servers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SAME = "same"
BETTER = "better: "  # prefix of a reason
ON_PURPOSE = "on purpose: "  # prefix of the name of an entry in the table of differences


@dataclass
class Told:
    """An observation with further fields than `said`."""

    said: Any = None
    reward: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bare:
    """A value that is returned as it is, instead of an observation."""

    value: Any


@dataclass
class Habit:
    """One habit, and the expected outcome."""

    call: Callable[[Any, str], Any]
    steps: tuple[str, ...] = ("go",)  # the session's requests, in order
    also: str = ""  # further calls of it: in `begin` (the constructor), `reset`, `state`, `close`
    options: dict[str, Any] = field(default_factory=dict)  # of the reset, found in `self.options`
    resets: bool = True  # before the first step
    posts: tuple[tuple[str, Any], ...] = ()  # paths and bodies of HTTP requests
    alone: bool = False
    at_import: str = ""  # beginning of the project's `server/app.py`
    at_end: str = ""  # end of that file
    files: dict[str, str] = field(default_factory=dict)  # additional or replaced files
    ours: str = SAME
    shared: str = ""  # if it differs from `ours`
    isolated: str = ""
    docker: str = ""  # if it differs from `shared`
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
    """Make a habit of a method."""
    return lambda call: Habit(call, **expected)


def habits_in(owner: type) -> Iterator[Habit]:
    """Yield the habits of a class `Habits`; a method without a decorator has all defaults."""
    for name, member in vars(owner).items():
        if isinstance(member, Habit):
            yield member
        elif callable(member) and not name.startswith("_"):
            yield Habit(member)
