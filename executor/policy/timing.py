# SPDX-License-Identifier: Apache-2.0
"""The executor's time-outs and intervals, in one value that tests replace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """The executor's waits, all in seconds.

    Attributes:
        burst_idle: a worker that is not kept exits after so long without a task, so that memory
            falls back after a burst.
        leave: a worker that has no task and was asked to exit is killed after it.
        exit_status: between a worker's exit and the report of its reaper.
        source_silence: a zygote that owes an answer for so long hangs or is stopped, and is
            replaced. Far more than a preload takes on a busy machine.
        source_exit: a zygote that was asked to exit is killed after it.
        watchdog: between looks at busy workers that have no cgroup.
        cgroup_look: between looks at the counters of busy workers' cgroups.
    """

    burst_idle: float = 10.0
    leave: float = 1.0
    exit_status: float = 1.0
    source_silence: float = 30.0
    source_exit: float = 2.0
    watchdog: float = 0.1
    cgroup_look: float = 1.0
