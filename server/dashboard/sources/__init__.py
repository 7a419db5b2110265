# SPDX-License-Identifier: Apache-2.0
"""The sources of the dashboard's entities: each reads a part of the daemon.

    machine.py         the daemon, memory, plan and workers
    environments.py    environments, their replicas, and deaths of these, as they are shown
    requests.py        the queue, what runs and what ended lately, and deaths of workers; rollouts,
                       with their last reports

Nothing here blocks the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...api.dependencies import Dependencies
from ..live_state import Source
from ..memory import MemoryHistory
from .environments import EnvironmentSource
from .machine import MachineSource
from .requests import RequestSource, RolloutSource


def make_sources(deps: Dependencies, memory: MemoryHistory, page: str) -> Sequence[Source]:
    """All of them, for the time in which somebody looks.

    Args:
        deps: The daemon's parts.
        memory: What is known of its memory.
        page: The version of the page's files.
    """
    return (
        MachineSource(deps, memory, page),
        EnvironmentSource(deps, memory),
        RequestSource(deps),
        RolloutSource(deps),
    )
