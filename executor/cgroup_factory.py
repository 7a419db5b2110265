# SPDX-License-Identifier: Apache-2.0
"""Cgroups for workers, from `processes.cgroups`."""

from __future__ import annotations

from .worker_cgroups import CgroupFactory


def cgroup_factory() -> CgroupFactory | None:
    """Makes a worker's cgroup; None where the system allows none."""
    return None
