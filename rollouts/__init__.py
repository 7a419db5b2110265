# SPDX-License-Identifier: Apache-2.0
"""Drives many sessions at once, and writes what came back.

    collector ──reserve──▶ ByteBudget ◀──release── writer thread ──▶ parts, journal, manifest
        │  steps, one by one                            ▲                     │
        └──put_step, finish──▶ stages ──────────────────┘                  readers

Every byte between a session and the disk is counted against one budget, so that memory stays flat
however slow the disk is. An unfinished episode is never visible; a finished one exists once.

Where to look:

    collector.py      many episodes at once; playing.py is one attempt at one of them
    episodes.py       the words: step, episode, sink
    buffers.py        the budget; standing.py: how many episodes may run within it
    turns.py          how many steps pass in a turn of the loop; interpreter.py: of Python itself
    batches.py        whole episodes in memory, for whoever takes them from Python
    to_folder.py      `openenv rollout`: choosing.py, tally.py, figures.py, loop_thread.py
    sessions/         hundreds of WebSockets on one loop
    policies/         who decides
    folder/           what is written, and how it is read
    stages/           advantages, filters, training samples

What others use is here, and imported when it is asked for: the daemon reads payloads alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collector import RolloutCollector as RolloutCollector
    from .episodes import Array as Array
    from .episodes import Episode as Episode
    from .folder.readers import open_rollouts as open_rollouts
    from .folder.writer import RolloutWriter as RolloutWriter
    from .policies.policy import Decision as Decision
    from .policies.policy import Turn as Turn

_PUBLIC = {
    "Array": "episodes",
    "Decision": "policies.policy",
    "Episode": "episodes",
    "RolloutCollector": "collector",
    "RolloutWriter": "folder.writer",
    "Turn": "policies.policy",
    "open_rollouts": "folder.readers",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
