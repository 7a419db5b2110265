# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of a process, or of a tree of them. Sizes are bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..process import macos, proc
from .cgroups import Cgroup

_IS_LINUX = sys.platform == "linux"


def anonymous_bytes(pid: int) -> int:
    """Return the process's resident memory without files; 0 if it is gone."""
    if not _IS_LINUX:
        return macos.resident_bytes(pid)
    resident, of_files = proc.resident_bytes(pid)
    return (resident or 0) - of_files


def tree_bytes(pid: int, shared_bytes: int = 0) -> int:
    """Return the memory of a process and its descendants, without files."""
    own = max(0, anonymous_bytes(pid) - shared_bytes)
    return own + sum(anonymous_bytes(child) for child in _descendants(pid))


def replica_bytes(status: Mapping[str, Any]) -> int | None:
    """Return a replica's memory by its shim's status: shim, server and all descendants.

    Pages that it shares with other replicas of the same zygote do not count, because a further
    replica would not need them again. None if it has no server, or is an engine's.
    """
    if status.get("pid") is None or "shim" not in status:
        return None
    cgroup = status.get("cgroup")
    held = Cgroup.from_json(cgroup).held_bytes() if cgroup else None
    if held is None:
        server = status["pid"]
        held = sum(proportional_bytes(pid) for pid in (server, *_descendants(server)))
    return held + private_bytes(status["shim"]["pid"])


def proportional_bytes(pid: int) -> int:
    """Return the process's memory without files; of shared pages, its proportional part."""
    return _rollup_bytes(pid, "Pss_Anon")


def private_bytes(pid: int) -> int:
    """Return the memory that the process has written and shares with no other one."""
    return _rollup_bytes(pid, "Private_Dirty")


def _rollup_bytes(pid: int, name: str) -> int:
    found = proc.rollup_bytes(pid, name)
    return anonymous_bytes(pid) if found is None else found


def _descendants(pid: int) -> set[int]:
    return proc.descendants_of(pid) if _IS_LINUX else macos.descendants_of(pid)
