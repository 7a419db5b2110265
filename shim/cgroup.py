# SPDX-License-Identifier: Apache-2.0
"""The cgroup of all shims, outside of any worker's and under no cap. Light: a shim imports it.

Its servers' groups are made beside it, by the manager that is handed out here.
"""

from __future__ import annotations

import contextlib
import os

from ..system.cgroups import Cgroup, CgroupManager

GROUPS_NAME = "replicas"  # the cgroup manager's name
SHIMS = "shims"


def enter_shims_group() -> tuple[CgroupManager, Cgroup] | None:
    """Leave the starter's cgroup (a worker's, capped); None where no groups can be made."""
    for _ in range(3):  # a shim on its way out may remove an empty group under our feet
        manager = CgroupManager(GROUPS_NAME)
        if not manager.available:
            return None
        with contextlib.suppress(OSError):
            group = manager.create(SHIMS)
            group.add(os.getpid())
            return manager, group
    return None


def leave_shims_group(entered: tuple[CgroupManager, Cgroup] | None) -> None:
    """Whoever leaves last removes it."""
    if entered is not None:
        manager, group = entered
        manager.leave(group)
