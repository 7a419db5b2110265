# SPDX-License-Identifier: Apache-2.0
"""The cgroup of all keepers, outside of any worker's and under no cap. Light: a keeper imports it.

Its servers' groups are made beside it, by the manager that is handed out here.
"""

from __future__ import annotations

import contextlib
import os

from ..system.cgroups import Cgroup, CgroupManager

GROUPS_NAME = "replicas"  # the cgroup manager's name
KEEPERS = "keepers"


def enter_keepers_group() -> tuple[CgroupManager, Cgroup] | None:
    """Leave the starter's cgroup (a worker's, capped); None where no groups can be made."""
    for _ in range(3):  # a keeper on its way out may remove an empty group under our feet
        manager = CgroupManager(GROUPS_NAME)
        if not manager.available:
            return None
        with contextlib.suppress(OSError):
            group = manager.create(KEEPERS)
            group.add(os.getpid())
            return manager, group
    return None


def leave_keepers_group(entered: tuple[CgroupManager, Cgroup] | None) -> None:
    """Whoever leaves last removes it."""
    if entered is not None:
        manager, group = entered
        manager.leave(group)
