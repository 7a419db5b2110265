# SPDX-License-Identifier: Apache-2.0
"""When a shim ends what it keeps: decided here from plain values and an explicit `now` (seconds,
monotonic), done in `loop.py`. Light: a shim imports it.

    asked to stop ──SIGTERM──▶ grace ──over──▶ KILL ──▶ clearing ──all collected──▶ said how it died
    the server died by itself ─────────────────▶        (its orphans)  └──over──▶ SETTLE, likewise

    its home was removed: missing at two looks with some time between; then as if asked to stop
"""

from __future__ import annotations

from enum import Enum

CLEAR_SECONDS = 5.0  # for the killed to be collected; longer only for one stuck in the kernel
GONE_SECONDS = 1.0  # without its run directory, at two looks, until it is held to be removed


class Step(Enum):
    """What is to be done now."""

    WAIT = "wait"
    KILL = "kill"  # the grace is over
    SETTLE = "settle"  # somebody is stuck in the kernel; do not keep silent about the rest


class Ending:
    """How far the end of the server, or of everything, has come."""

    def __init__(self) -> None:
        self.is_wanted = False  # of the shim too: what has exited is not started again
        self.deadline: float | None = None
        self._is_clearing = False

    def want(self, now: float, grace_seconds: float) -> bool:
        """Ask for the end of everything; True at the first call, a later one can only shorten the
        grace."""
        deadline = now + max(0.0, grace_seconds)
        if self.is_wanted:
            self.deadline = min(deadline, self.deadline or deadline)
            return False
        self.is_wanted = True
        self.deadline = deadline
        return True

    def step(self, now: float) -> Step:
        """What the deadline asks for."""
        if self.deadline is None or now < self.deadline:
            return Step.WAIT
        return Step.SETTLE if self._is_clearing else Step.KILL

    def clear(self, now: float) -> None:
        """Everything was sent SIGKILL, and is waited for."""
        self._is_clearing = True
        self.deadline = now + CLEAR_SECONDS

    def settle(self) -> None:
        """Nothing of the server is left, or nothing that can be ended."""
        self._is_clearing = False
        self.deadline = None


class Home:
    """Whether the run directory is there; without it nobody will ever ask for us again."""

    def __init__(self) -> None:
        self._missing_since: float | None = None

    @property
    def is_missing(self) -> bool:
        """Whether it was, at the last look."""
        return self._missing_since is not None

    def look(self, now: float, *, is_missing: bool) -> bool:
        """Note what was seen; True when it is gone for good."""
        if not is_missing:
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
            return False
        return now - self._missing_since >= GONE_SECONDS
