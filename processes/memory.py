# SPDX-License-Identifier: Apache-2.0
"""What a process, or a tree of them, holds now. Sizes are bytes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

_MOST_DEPTH = 16  # of a tree of processes


def anonymous_bytes(pid: int) -> int:
    """What is resident of the process and no file's; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, of_files = file.read().split()[:3]
    except OSError:
        return 0 if sys.platform == "linux" else _resident_bytes(pid)
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def tree_bytes(pid: int, born_bytes: int = 0) -> int:
    """What a process holds of its own, with everything below it; `born_bytes` is what it shares
    with the process that it was forked from.
    """
    own = max(0, anonymous_bytes(pid) - born_bytes)
    return own + sum(anonymous_bytes(child) for child in _descendants(pid))


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    generation = {pid}
    for _ in range(_MOST_DEPTH):
        generation = {child for parent in generation for child in _children(parent)} - found
        if not generation:
            break
        found |= generation
    return found


def _children(pid: int) -> Iterable[int]:
    if sys.platform != "linux":
        return _children_elsewhere(pid)
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _children_elsewhere(pid: int) -> Iterable[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []
