# SPDX-License-Identifier: Apache-2.0
"""Cgroups for the workers of one daemon: `openenvd/executor-<its pid>/long-1`."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ...system.cgroups import CgroupManager
from .worker_cgroups import CgroupFactory

log = logging.getLogger(__name__)

_PREFIX = "executor-"


class ExecutorCgroups:
    """Makes and in the end removes the groups of one executor; `create` is the factory."""

    def __init__(self) -> None:
        self._manager = CgroupManager(f"{_PREFIX}{os.getpid()}")
        if not self._manager.available:
            log.info("workers have no cgroups of their own: %s", self._manager.why_not)
            return
        remove_groups_of_the_dead(Path(self._manager.directory).parent)

    @property
    def create(self) -> CgroupFactory | None:
        """Makes a worker's cgroup; None where the system allows none."""
        return self._manager.create if self._manager.available else None

    def remove(self) -> None:
        """Remove what is empty."""
        self._manager.remove()


def remove_groups_of_the_dead(top: Path) -> None:
    """A killed daemon cannot remove its own. Groups that hold a process stay."""
    with contextlib.suppress(OSError):
        for folder in top.glob(f"{_PREFIX}*"):
            if not Path(f"/proc/{folder.name.removeprefix(_PREFIX)}").exists():
                _remove(folder)


def _remove(folder: Path) -> None:
    for group in [*folder.glob("*/"), folder]:
        with contextlib.suppress(OSError):
            group.rmdir()
