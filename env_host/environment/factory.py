# SPDX-License-Identifier: Apache-2.0
"""Where an environment is created and closed, and by whom: the `Maker` of one process.

    the class is synchronous            on the session's thread, where all its calls run
    asynchronous, or not known yet      on the session's thread, which then ends
    asynchronous, and quick to create   on the event loop: no thread at all

Quick is what has been seen to be, by the clock of the thread's own CPU time: the other clock also
shows waits for the GIL. Creations that hold the loop for too long, or one that fails there (it may
want a loop of its own), send all that follow back to threads, for good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .signatures import manner_of

QUICK_CPU_SECONDS = 0.002
QUICK_SECONDS = 0.1
STALL_SECONDS = 0.05  # on the loop
MOST_STALLS = 3  # a machine that is busy elsewhere makes some, too

log = logging.getLogger("openenvd.env_host")


class Place(Enum):
    """Where the next environment is created."""

    THREAD = auto()
    LOOP = auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """One creation."""

    is_async: bool
    place: Place
    seconds: float
    cpu_seconds: float


def next_place(before: Place, seen: Seen, stalls: int) -> Place | None:
    """Where the next one goes; None: on threads from now on, whatever is seen."""
    if not seen.is_async:
        return None if before is Place.LOOP else Place.THREAD
    if seen.place is Place.LOOP:
        return None if stalls >= MOST_STALLS else Place.LOOP
    is_quick = seen.seconds < QUICK_SECONDS and seen.cpu_seconds < QUICK_CPU_SECONDS
    return Place.LOOP if is_quick else before


class Maker:
    """Creates environments, and learns from it."""

    def __init__(self, factory: Callable[[], Any], *, may_use_loop: bool) -> None:
        self._factory = factory
        self._is_settled = not may_use_loop
        self._stalls = 0
        self.place = Place.THREAD

    def make_on_loop(self) -> Any:
        """A new environment, here and now; None when it is to be created on a thread after all."""
        try:
            return self._make(Place.LOOP)
        except Exception:
            log.info("creating an environment on the loop failed; trying a thread", exc_info=True)
            self._settle()
            return None

    def make(self) -> Any:
        """A new environment. On any thread.

        Raises:
            BaseException: whatever the factory raises.
        """
        return self._make(Place.THREAD)

    def _make(self, place: Place) -> Any:
        started, cpu = time.monotonic(), time.thread_time()
        env = self._factory()
        if not self._is_settled:
            seconds, cpu_seconds = time.monotonic() - started, time.thread_time() - cpu
            self._learn(Seen(manner_of(env).is_async, place, seconds, cpu_seconds))
        return env

    def _learn(self, seen: Seen) -> None:
        self._stalls += seen.place is Place.LOOP and seen.seconds >= STALL_SECONDS
        place = next_place(self.place, seen, self._stalls)
        if place is None:
            log.warning("an environment took %.3f s to create; threads do it now", seen.seconds)
            self._settle()
        else:
            self.place = place

    def _settle(self) -> None:
        self._is_settled = True
        self.place = Place.THREAD
