# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the SDK: the options of launches, rollouts and drains, and of any request.

Names, meanings and defaults are those of the commands: `openenv launch --help`, and `--set help`.
Generated from where they are declared: `python tests/repository/sdk_options.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict


class RequestOptions(TypedDict, total=False):
    """The options of any request."""

    priority: int
    timeout_seconds: float | None
    idempotency_key: str | None
    retry_oom: bool


class DrainOptions(RequestOptions, total=False):
    """The options for stopping replicas."""

    drain_timeout_seconds: float


class LaunchOptions(DrainOptions, total=False):
    """The options of a launch."""

    max_sessions: int | None
    shards: int | None
    isolate: bool | None
    session_memory_mb: int | None
    admission_timeout_seconds: float
    step_timeout_seconds: float | None
    reset_first: bool | None
    http_session_idle_seconds: float
    max_message_mb: int
    gpus: int | None
    serve_as_is: bool
    host: str
    allow_origin: list[str]
    token: str | None
    provider: str
    replicas: int
    min_replicas: int | None
    max_replicas: int | None
    scale_down_seconds: float
    idle_timeout_seconds: float | None
    env: dict[str, str]
    with_packages: list[str]
    port: int | None
    gateway: bool
    memory_mb: int | None
    cpus: float | None
    base: str
    sandbox: bool
    engine_options: list[str]
    ready_timeout_seconds: float
    max_surge: str | None
    max_unavailable: str | None


class RolloutOptions(RequestOptions, total=False):
    """The options of a rollout."""

    episodes: int
    concurrency: int
    policy: str
    max_steps: int
    step_timeout_seconds: float
    policy_timeout_seconds: float | None
    episode_timeout_seconds: float | None
    retries: int
    seed: int | None
    reset: dict[str, Any]
    tree: str | None
    group: int | None
    advantages: str | None
    filters: list[str]
    keep_failed: bool
    buffer_mb: int
    env: dict[str, str]
    memory_mb: int | None
