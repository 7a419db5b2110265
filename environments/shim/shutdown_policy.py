# SPDX-License-Identifier: Apache-2.0
"""When a shim ends its server, and itself: decisions from plain values and an explicit `now`.

    stop requested ──SIGTERM──▶ grace ──over──▶ KILL ──▶ all reaped, or GIVE_UP_SECONDS ──▶ settled
    drain requested ──SIGUSR1──▶ time-out ──over──▶ STOP, as above
    the server exited by itself ──────────────▶        (its orphans)

    its run directory removed: missing at two looks with some time between; then as if by a stop

Times are monotonic seconds. Light: a shim imports it.
"""

from __future__ import annotations

from enum import Enum

LEFT_GRACE_SECONDS = 5.0  # of a server whose sessions have not ended when its drain is over
GIVE_UP_SECONDS = 5.0  # for the killed to be reaped; longer only for one stuck in the kernel
REMOVED_SECONDS = 1.0  # without its run directory, at two looks, until it is held to be removed


class ShutdownStep(Enum):
    """What is to be done now."""

    WAIT = "wait"
    KILL = "kill"  # the grace is over
    STOP = "stop"  # the sessions of a drained server have not ended in time
    GIVE_UP = "give up"  # a process is stuck in the kernel; report the exit of the rest


class ShutdownPolicy:
    """How far the end of the server, or of everything, has come."""

    def __init__(self) -> None:
        self.is_requested = False
        self.is_draining = False  # its sessions are to end first
        self.deadline: float | None = None
        self._has_killed = False

    @property
    def is_ending(self) -> bool:
        """Whether the shim is to exit with the server: what has exited is not started again."""
        return self.is_requested or self.is_draining

    def drain(self, now: float, timeout_seconds: float) -> bool:
        """Request the end once all sessions have ended; a second request can only shorten the time.

        Returns:
            Whether this is the first request.
        """
        deadline = now + max(0.0, timeout_seconds)
        if self.is_draining:
            deadline = min(deadline, self.deadline or deadline)
        if not (self.is_requested or self._has_killed):
            self.deadline = deadline
        is_first, self.is_draining = not self.is_ending, True
        return is_first

    def request(self, now: float, grace_seconds: float) -> bool:
        """Request the end of all; tell whether it is the first. More can only shorten it."""
        deadline = now + max(0.0, grace_seconds)
        if self.is_requested:
            self.deadline = min(deadline, self.deadline or deadline)
            return False
        self.is_requested = True
        self.deadline = deadline
        return True

    def step(self, now: float) -> ShutdownStep:
        """Return what the deadline asks for."""
        if self.deadline is None or now < self.deadline:
            return ShutdownStep.WAIT
        if self._has_killed:
            return ShutdownStep.GIVE_UP
        return ShutdownStep.KILL if self.is_requested else ShutdownStep.STOP

    def note_kill(self, now: float) -> None:
        """Note that everything was sent SIGKILL, and is waited for."""
        self._has_killed = True
        self.deadline = now + GIVE_UP_SECONDS

    def note_end(self) -> None:
        """Note that nothing of the server is left, or nothing that can be ended."""
        self._has_killed = False
        self.deadline = None


class RunDirectoryWatch:
    """Whether the run directory is there; without it no client will ever find this shim again."""

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
        return now - self._missing_since >= REMOVED_SECONDS
