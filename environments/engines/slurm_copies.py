# SPDX-License-Identifier: Apache-2.0
"""Copies of what is launched, for other machines or on them: which are in use, and which can go.

    launch ──holds PREPARING, shared──▶ makes a copy, starts replicas: run files name the copy
    agent  ──holds it alone, or later──▶ removes copies that no run file names

A launch that is killed holds nothing any more. A replica uses its copy
until what runs of it has ended for good: not when it sleeps, or has exited and is started again.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...shim.client import read_status_file
from .. import run_files
from ..layout import Layout, make_private

LOCK_FILE_NAME = "preparing.lock"  # in the folder of all engines


@contextmanager
def preparing(layout: Layout) -> Iterator[None]:
    """Keep copies from being removed until the replicas that use them are written down."""
    descriptor = _open(layout)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


class Copies:
    """Which copies of a home are in use; an agent's, told of the replicas whose jobs begin and end.

    Args:
        layout: The home's.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._removed: set[str] = set()  # replicas of which nothing runs any more
        self._lock = threading.Lock()

    def started(self, replica: str) -> None:
        """Note that a replica is about to run."""
        self._removed.discard(replica)

    def removed(self, replica: str) -> None:
        """Note that nothing of a replica runs any more, until it is started again."""
        self._removed.add(replica)

    @contextmanager
    def in_use(self) -> Iterator[set[str] | None]:
        """Yield the digests of those in use, while no other can become so; None: one may."""
        with self._lock:
            descriptor = _open(self._layout)
            try:
                alone = _is_alone(descriptor)
                yield _in_use(self._layout, self._removed) if alone else None
            finally:
                os.close(descriptor)


def _is_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def digest_of(plan: dict[str, Any]) -> str:
    """Return the digest of the copy that a replica's plan names; it may be none."""
    made_on_nodes = plan.get("source") or {}
    return str(made_on_nodes.get("digest") or Path(plan.get("folder", "/")).parent.name)


def _in_use(layout: Layout, removed: Collection[str]) -> set[str]:
    found = set()
    for run_file in run_files.all_of(layout.runs):
        state = (read_status_file(run_file.run_dir) or {}).get("state")
        has_ended = state == "stopping" and run_file.replica_id in removed
        if run_file.provider == "slurm" and state != "stopped" and not has_ended:
            found.add(digest_of(run_file.data.get("plan") or {}))
    return found


def _open(layout: Layout) -> int:
    path = make_private(layout.engines) / LOCK_FILE_NAME
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
