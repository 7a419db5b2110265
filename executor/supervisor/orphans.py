# SPDX-License-Identifier: Apache-2.0
"""Ending workers that a killed daemon left behind, by what its database still says of them.

Normally there are none: the kernel ends a worker's process group with its daemon (`worker.py`).
This is the belt to those braces, for a machine where that does not exist or was defeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...processes.tree import stop_tree
from ...system.process_identity import ProcessIdentity


def sweep_orphans(records: Iterable[tuple[int, float]]) -> list[int]:
    """End every worker of `(pid, started_at)` that still lives, its whole session with it.

    A pid that now belongs to another process is left alone. Returns the pids that were ended.
    """
    ended = []
    for pid, started_at in records:
        identity = ProcessIdentity(pid, started_at)
        if identity.is_alive():
            stop_tree(identity, grace_seconds=0.0, session=True)
            ended.append(pid)
    return ended
