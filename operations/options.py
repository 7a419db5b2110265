# SPDX-License-Identifier: Apache-2.0
"""The options of a rollout, as plain data: its flags and its payload derive from them.

A launch's options are `environments.spec.LaunchOptions`. Standard library alone: the command line
imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..system.options import option


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How episodes are played and written. Each option is declared here and nowhere else."""

    episodes: int = option(256, "How many, altogether.", least=1, most=10_000_000)
    concurrency: int = option(64, "How many at once.", least=1, most=10_000)
    policy: str = option("random", "module:function, openai:URL, or random.", metavar="POLICY")
    max_steps: int = option(100, "Most steps of an episode.", least=1)
    step_timeout_seconds: float = option(60.0, "Longest reset or step.", above=0)
    policy_timeout_seconds: float | None = option(None, "Longest call of the policy.", above=0)
    episode_timeout_seconds: float | None = option(None, "Longest episode.", above=0)
    retries: int = option(2, "Further attempts at an episode that fails.", least=0, most=1000)
    seed: int | None = option(None, "Of the first episode; each further one, or group, adds 1.")
    reset: dict[str, Any] = option(dict, "More for every reset.", flag="")  # noqa: RUF009
    group: int | None = option(
        None, "N episodes begin alike, and are compared with each other.", least=2, most=10_000
    )
    advantages: str | None = option(
        None,
        "group-normalised (the default with --group), leave-one-out, centred, module:function.",
        metavar="HOW",
    )
    filters: list[str] = option(  # noqa: RUF009
        list,
        "Keep min-steps=N, max-steps=N, min-reward=R, max-reward=R; drop failed, zero-advantage, "
        "or what module:function says. Repeatable.",
        flag="--filter",
        metavar="FILTER",
    )
    format: str = option("jsonl", "Of the files.", choices=("jsonl", "parquet", "arrow"))
    keep_failed: bool = option(False, "Write episodes that failed, too.")
    keep_cached: bool = option(False, "Leave large files in the page cache, to be read at once.")
    buffer_mb: int = option(256, "Most memory between sessions and disk.", least=4, most=2**20)
    max_loop_lag_seconds: float | None = option(
        None, "Fail when the event loop was held for longer.", above=0
    )
    env: dict[str, str] = option(  # noqa: RUF009
        dict, "A variable for the policy; without a value, the one it has here. Repeatable."
    )
    memory_mb: int | None = option(None, "Most memory of the rollout.", least=32)
