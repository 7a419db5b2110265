# SPDX-License-Identifier: Apache-2.0
"""Runs many episodes at once on OpenEnv servers, and writes the results or passes them on.

    collector ──put_step, finish──▶ stages ──▶ writer's threads ──▶ files ──▶ readers

Memory stays flat however slow the disk is: the writer of a step waits until it is on disk. A
finished episode exists exactly once; an unfinished one is never visible.

    run.py                 `openenv rollout`: a rollout into a folder, or the rest of one
    collector.py           many episodes at once, and their retries; for Python callers it yields
                           whole episodes in memory; episode_runner.py: one attempt
    trees.py               episodes that branch
    episodes.py            step, episode, sink; counts of them
    buffers.py             a budget of memory, and how many episodes run within it
    session_pool.py        open sessions, and the episodes that wait for one; answers.py: answers
    session/               one session at a server, for all clients
    policies/              policies, which decide on actions
    stages/                advantages, filters, failed episodes
    errors.py              the errors
    folder/                writes and reads the folder of a rollout
    replay.py              a program that shows a folder to the dashboard; images.py: images in it

The public names are imported when they are first used, because the daemon needs only payloads.
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
