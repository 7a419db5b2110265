# SPDX-License-Identifier: Apache-2.0
"""`UnusableEngine`: stands for an engine whose library cannot be imported.

The agent runs all the same, and says what is missing: to `openenv check`, and to each replica that
is to be started, which is refused at once. What runs on the engine already goes on, out of reach.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .base import Check, EngineGone, EngineRefused, ReplicaPlan


class UnusableEngine:
    """Answers with why it cannot be asked."""

    def __init__(self, name: str, why: EngineRefused) -> None:
        self.name = name
        self._why = why

    def check(self) -> Check:
        """Tell what is missing."""
        return Check(problem=self._why.message, remedy=self._why.hint)

    def start(self, _: ReplicaPlan) -> NoReturn:
        """Refuse for good: trying again would not help."""
        raise self._why

    find = start  # what was refused is not looked for when it is stopped

    def close(self) -> None:
        """Nothing is open."""

    def __getattr__(self, name: str) -> Any:
        """Return what refuses, for every other method of an engine."""

        def refuse(*_: object) -> NoReturn:
            raise EngineGone(self._why.message, self._why.hint)

        return refuse
