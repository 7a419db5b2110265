# SPDX-License-Identifier: Apache-2.0
"""What a process, or a tree of them, holds now. Sizes are bytes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any

from ...system.cgroups import Cgroup

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


def replica_bytes(status: dict[str, Any]) -> int | None:
    """What a replica holds, by its shim's status: shim, server and all below it.

    Pages that it shares with other replicas of the same fork server are not its own: another
    replica would not need them again. None when it has no server.
    """
    if status.get("pid") is None:
        return None
    cgroup = status.get("cgroup")
    held = Cgroup.from_json(cgroup).held_bytes() if cgroup else None
    if held is None:
        server = status["pid"]
        held = sum(proportional_bytes(pid) for pid in (server, *_descendants(server)))
    return held + private_bytes(status["shim"]["pid"])


def proportional_bytes(pid: int) -> int:
    """What is the process's and no file's; of what several share, its part."""
    return _rollup_bytes(pid, b"Pss_Anon:")


def private_bytes(pid: int) -> int:
    """What the process has written and shares with nobody."""
    return _rollup_bytes(pid, b"Private_Dirty:")


def _rollup_bytes(pid: int, name: bytes) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found = dict(line.split()[:2] for line in file.readlines()[1:])
        return int(found[name]) * 1024
    except (OSError, ValueError, KeyError):  # it is gone, or not on Linux, or before 5.4
        return anonymous_bytes(pid)


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
