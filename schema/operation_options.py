# SPDX-License-Identifier: Apache-2.0
"""The options of operations, as plain data: flags and payloads derive from them.

A launch's options are `environments.spec.LaunchOptions`. Standard library alone: the command line
imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..system.text.options import option
from .spec import DEFAULT_BASE


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The options of a rollout. Each option is declared here and nowhere else."""

    episodes: int = option(256, "Number of episodes, or of trees.", least=1, most=10_000_000)
    concurrency: int = option(64, "Number of episodes at once.", least=1, most=10_000)
    policy: str = option("random", "module:function, openai:URL, or random.", metavar="POLICY")
    max_steps: int = option(100, "Maximum number of steps in an episode.", least=1)
    step_timeout_seconds: float = option(60.0, "Time limit of a reset or step.", above=0)
    policy_timeout_seconds: float | None = option(None, "Time limit of a policy call.", above=0)
    episode_timeout_seconds: float | None = option(None, "Time limit of an episode.", above=0)
    retries: int = option(2, "Further attempts at an episode that fails.", least=0, most=1000)
    seed: int | None = option(
        None, "Seed of the first episode. Each further episode, or group, adds 1."
    )
    reset: dict[str, Any] = option(dict, "Further arguments of each reset.", own_flag="")  # noqa: RUF009
    tree: str | None = option(
        None,
        "Branch each episode: its width and depth, and perhaps the steps between, every=N. "
        "The episodes of a tree are a group.",
        metavar="width=N,depth=N",
    )
    group: int | None = option(
        None, "N episodes each begin alike, to be compared.", least=2, most=10_000
    )
    advantages: str | None = option(
        None,
        "How a group's advantages are computed. group-normalised (the default with --group), "
        "leave-one-out, centred, module:function.",
        metavar="HOW",
    )
    filters: list[str] = option(  # noqa: RUF009
        list,
        "Which episodes to keep: min-steps=N, max-reward=R. Also max-steps=N, min-reward=R; or "
        "which to drop: failed, zero-advantage, what module:function says. Repeatable.",
        own_flag="--filter",
        metavar="FILTER",
    )
    keep_failed: bool = option(False, "Write failed episodes, too.")
    buffer_mb: int = option(256, "Memory limit between sessions and disk.", least=4, most=2**20)
    env: dict[str, str] = option(  # noqa: RUF009
        dict, "A variable for the policy. Without a value, the one it has here. Repeatable."
    )
    memory_mb: int | None = option(None, "Memory limit of the rollout.", least=32)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The options of a measurement. Each option is declared here and nowhere else."""

    repetitions: int = option(
        3, "How often each batch is measured.", least=1, most=100, own_flag="--reps"
    )
    window: int | None = option(
        None, "Handshakes under way at once; by default all of a batch.", least=1
    )
    session_timeout_seconds: float = option(
        120.0, "Time limit of a session, beyond its wait.", above=0
    )


MEMORY_LIMITS = ("memory_mb", "session_memory_mb")  # that a request may be given when it is retried
# Of `server/operations/testing/`.
CHECK_NAMES = ("protocol", "memory", "blocking", "determinism", "processes", "branching", "leaks")


@dataclass(frozen=True, kw_only=True)
class EnvironmentTestOptions:
    """The options of an environment's test. Each option is declared here and nowhere else."""

    sessions: int = option(1000, "Number of sessions played to find leaks.", least=20, most=10**6)
    concurrency: int = option(16, "Number of them at once.", least=1, most=1000)
    steps: int = option(5, "Number of steps in each.", least=0, most=10_000)
    seed: int = option(7, "Seed of the episodes that are compared.")
    step_timeout_seconds: float = option(30.0, "Time limit of a reset or step.", above=0)
    ignore: list[str] = option(  # noqa: RUF009
        list,
        "A field of the observation that may differ under a seed: a time, an id. Repeatable.",
        metavar="FIELD",
    )
    skip: list[str] = option(  # noqa: RUF009
        list, f"Leave out a check: {', '.join(CHECK_NAMES)}. Repeatable.", metavar="CHECK"
    )


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of any request. Each option is declared here and nowhere else."""

    priority: int = option(
        0, "From -100 to 100; higher priorities run earlier.", least=-100, most=100
    )
    timeout_seconds: float | None = option(
        None, "Time limit of the whole request, from its start.", above=0
    )
    idempotency_key: str | None = option(
        None,
        "The same request again with the same key returns the first one.",
        most=200,
        metavar="KEY",
    )
    retry_oom: bool = option(False, "Run again with more memory if killed for memory.")


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    """The options for draining replicas. Declared here and nowhere else."""

    drain_timeout_seconds: float = option(
        600.0, "How long sessions may go on in a replica that is replaced or taken away.", least=0
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options for building an image. Each option is declared here and nowhere else."""

    base: str = option(DEFAULT_BASE, "Image that it is based on; it has a Python.", metavar="IMAGE")
    tag: str | None = option(None, "What else to call it: NAME:TAG.", metavar="IMAGE")
    with_packages: list[str] = option(  # noqa: RUF009  a field with a factory
        list, "Install this package as well. Repeatable.", own_flag="--with", metavar="PACKAGE"
    )
