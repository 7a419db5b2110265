# SPDX-License-Identifier: Apache-2.0
"""Two settings of the Python that episodes run in, changed while any of them do.

*The garbage collector runs less often.* A full collection blocks the loop for longer the more
objects there are: 60 ms in a process that has imported little, a multiple of that beside a
trainer's libraries. It runs after a number of objects were made and not freed, and episodes that
begin make enough of them. Cycles that a policy leaves behind are still found, while a collection of
young objects takes 1 ms, and one of the middle generation, up to twenty thousand objects, 5 ms.

*Threads yield sooner.* The loop needs the GIL anew after each wait, and a thread that computes
in Python gives it up when it is asked to, by default after 5 ms, each time. With policies of 100 ms
in two such threads the loop was 144 ms late (p99), with a tenth of a millisecond it is 4; with
policies of 3 ms, a tenth fewer of them are called.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Thresholds = tuple[int, int, int]

THRESHOLDS: Thresholds = (2_000, 10, 100)  # Python's: 700, 10, 10
SWITCH_SECONDS = 0.0001  # Python's: 0.005

_T = TypeVar("_T")


@contextmanager
def while_episodes_run() -> Iterator[None]:
    """Changes the settings until the last rollout that needs them has ended."""
    with _GARBAGE.changed(), _SWITCHING.changed():
        yield


def thresholds(now: Thresholds) -> Thresholds:
    """What becomes of these: who looks less often, or not at all, as it is, keeps that."""
    if now[0] == 0:  # the collector is off
        return now
    first, second, third = (max(pair) for pair in zip(now, THRESHOLDS, strict=True))
    return first, second, third


def switch_interval(now: float) -> float:
    """What becomes of it."""
    return min(now, SWITCH_SECONDS)


class _Setting(Generic[_T]):
    """A setting that its first user changes and its last user restores."""

    def __init__(
        self, read: Callable[[], _T], write: Callable[[_T], object], wanted: Callable[[_T], _T]
    ) -> None:
        self._read = read
        self._write = write
        self._wanted = wanted
        self._lock = threading.Lock()  # guards what follows
        self._under_way = 0
        self._before: _T | None = None

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Changes the setting meanwhile; a change by other code in between is kept."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._before = self._read()
                self._write(self._wanted(self._before))
            self._under_way += 1

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1
            before = self._before
            if not self._under_way and before is not None:
                if self._read() == self._wanted(before):
                    self._write(before)
                self._before = None


_GARBAGE = _Setting(gc.get_threshold, lambda now: gc.set_threshold(*now), thresholds)
_SWITCHING = _Setting(
    lambda: round(sys.getswitchinterval(), 6),  # it is kept in whole microseconds
    sys.setswitchinterval,
    switch_interval,
)
