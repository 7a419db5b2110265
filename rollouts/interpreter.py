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
from collections.abc import Iterator
from contextlib import contextmanager

Thresholds = tuple[int, int, int]

THRESHOLDS: Thresholds = (2_000, 10, 100)  # Python's: 700, 10, 10
SWITCH_SECONDS = 0.0001  # Python's: 0.005

_lock = threading.Lock()  # guards what follows
_before: list[
    tuple[Thresholds, float]
] = []  # of each rollout under way: what the first of them found


@contextmanager
def while_episodes_run() -> Iterator[None]:
    """Changes the settings until the last rollout that needs them has ended.

    A change by other code in between is kept.
    """
    with _lock:
        found = _before[0] if _before else (gc.get_threshold(), _switch_interval())
        if not _before:
            gc.set_threshold(*thresholds(found[0]))
            sys.setswitchinterval(min(found[1], SWITCH_SECONDS))
        _before.append(found)
    try:
        yield
    finally:
        with _lock:
            garbage, switching = _before.pop()
            if not _before and gc.get_threshold() == thresholds(garbage):
                gc.set_threshold(*garbage)
            if not _before and _switch_interval() == min(switching, SWITCH_SECONDS):
                sys.setswitchinterval(switching)


def thresholds(now: Thresholds) -> Thresholds:
    """What becomes of these: who looks less often, or not at all, as it is, keeps that."""
    if now[0] == 0:  # the collector is off
        return now
    first, second, third = (max(pair) for pair in zip(now, THRESHOLDS, strict=True))
    return first, second, third


def _switch_interval() -> float:
    return round(sys.getswitchinterval(), 6)  # it is kept in whole microseconds
