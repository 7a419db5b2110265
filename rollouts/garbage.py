# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, asked to look less often while many episodes run.

A look at everything holds the loop for as long as there is much to look at: 60 ms in a process that
has imported little, a multiple of that beside a trainer's libraries. It is due after so many
objects were made and not freed, and episodes that begin make enough of them. The thresholds below
put it off: cycles that a policy leaves behind are found, while a look at what is young takes 1 ms,
and one at what is of middle age, up to twenty thousand objects, 5 ms.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (2_000, 10, 100)  # Python's: 700, 10, 10

_lock = threading.Lock()  # guards what follows
_under_way = 0
_before = (0, 0, 0)


@contextmanager
def less_often() -> Iterator[None]:
    """Until the last of those who asked for it has ended. Who has it less often, or not at all, as
    it is, keeps that.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def thresholds(now: tuple[int, int, int]) -> tuple[int, int, int]:
    """What becomes of these: the first of them is 0 where the collector is off."""
    if now[0] == 0:
        return now
    first, second, third = (max(pair) for pair in zip(now, THRESHOLDS, strict=True))
    return first, second, third


def _begin() -> None:
    global _under_way, _before
    with _lock:
        if _under_way == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*thresholds(_before))
        _under_way += 1


def _end() -> None:
    global _under_way
    with _lock:
        _under_way -= 1
        if _under_way == 0 and gc.get_threshold() == thresholds(_before):
            gc.set_threshold(*_before)  # unless somebody has set others meanwhile
