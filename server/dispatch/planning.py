# SPDX-License-Identifier: Apache-2.0
"""The plan for this machine under these settings, or why there is none.

Light: a daemon that is too large for its machine has to find out before it has grown to its size.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...executor.errors import PlanError
from ...executor.policy.plan import Plan, plan_workers
from ...schema.settings import Settings
from ...system.memory.limits import Limits
from ...system.memory.pids_limit import ProcessRoom
from ...system.text.units import MB
from ..errors import DaemonError

DAEMON_BYTES = 64 * MB  # of their own, of the daemon, its zygote and one idle worker
# Beyond the daemon itself: its zygote, a worker of each schedule, and its threads (dispatcher,
# supervisor, lag, and some that look into files).
PROCESSES_OF_DAEMON = 10
NO_PROCESSES_HINT = "stop what is not needed, or raise that limit"


def check_process_room(room: ProcessRoom | None) -> None:
    """Refuse to start what would be refused a thread on its way.

    Raises:
        DaemonError: fewer processes and threads are left than a daemon has.
    """
    if room is None or room.left >= PROCESSES_OF_DAEMON:
        return
    raise DaemonError(
        "no_processes",
        f"the daemon needs {PROCESSES_OF_DAEMON} more processes and threads, and {room.left} "
        f"are left: {room.sentence()}",
        NO_PROCESSES_HINT,
    )


def plan_for(limits: Limits, settings: Settings, expected: Mapping[str, int]) -> Plan:
    """How many workers there may be, when each needs what is `expected` of its schedule.

    Raises:
        DaemonError: too few bytes for one LONG and one SHORT worker.
    """
    try:
        return plan_workers(
            limits,
            max_long=settings.max_long_workers,
            max_short=settings.max_short_workers,
            worker_memory_bytes=settings.worker_memory_mb * MB,
            reserve_bytes=settings.reserve_mb * MB,
            daemon_bytes=DAEMON_BYTES,
            expected=expected,
        )
    except PlanError as exc:
        raise DaemonError("too_small", exc.message, exc.hint) from exc
