# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the SDK: the options of launches, rollouts and drains, and of any request.

Generated from where they are declared: `python tests/repository/sdk_options.py`.
"""

from __future__ import annotations

from typing import Any, TypedDict


class RequestOptions(TypedDict, total=False):
    """How a request is queued and run."""

    priority: int
    """From -100 to 100; higher priorities run earlier."""

    timeout_seconds: float | None
    """Time limit of the whole request, from its start. In seconds."""

    idempotency_key: str | None
    """The same request again with the same key returns the first one."""

    retry_oom: bool
    """Run again with more memory if killed for memory."""


class DrainOptions(RequestOptions, total=False):
    """How replicas that are taken away end."""

    drain_timeout_seconds: float
    """How long sessions may go on in a replica that is replaced or taken away. In seconds
    [600.0]."""


class LaunchOptions(DrainOptions, total=False):
    """How an environment is started."""

    max_sessions: int | None
    """Maximum number of sessions, of all replicas."""

    shards: int | None
    """Processes of each replica that serve sessions. `auto`, the default: one per core."""

    isolate: bool | None
    """A process for each session. By default where the class needs it."""

    session_memory_mb: int | None
    """Memory limit of each session. It has a process of its own. In MB (2**20 bytes)."""

    admission_timeout_seconds: float
    """How long a client waits for a session when all are taken. In seconds [5.0]."""

    step_timeout_seconds: float | None
    """Time limit of a reset, step or tool. Past it the client gets an error. In seconds."""

    reset_first: bool | None
    """Refuse a session's steps before its first reset. By default as the class says: yes."""

    http_session_idle_seconds: float
    """A session without a WebSocket ends when unused for so long; 0: never. In seconds [900.0]."""

    max_message_mb: int
    """Size limit of a message or body that a client sends. In MB (2**20 bytes) [100]."""

    gpus: int | None
    """GPUs of each replica. Its shards take them in turn."""

    serve_as_is: bool
    """Run the project's own app, untouched."""

    host: str
    """Address to listen on. One that others can reach needs a token [127.0.0.1]."""

    allow_origin: list[str]
    """Origin whose web pages may connect: https://host. Clients may call it by that name, too."""

    token: str | None
    """What clients must send. `auto` makes one. By default where others can reach the
    environment."""

    provider: str
    """Provider that runs the replicas [local]."""

    replicas: int
    """Number of env servers behind one address [1]."""

    min_replicas: int | None
    """Fewest replicas when it scales itself [1]. 0: it sleeps when nobody uses it."""

    max_replicas: int | None
    """Most replicas; it scales itself by its sessions."""

    scale_down_seconds: float
    """Fewer replicas must have been enough for so long. In seconds [60.0]."""

    idle_timeout_seconds: float | None
    """End its server when unused for so long. A client that connects starts it. In seconds."""

    env: dict[str, str]
    """A variable for the environment."""

    with_packages: list[str]
    """Install this package, too. It stays apart from the project's own environment."""

    port: int | None
    """Port to listen on, by default a free one."""

    gateway: bool
    """Balance sessions over its replicas by Envoy. Its address is the gateway's."""

    memory_mb: int | None
    """Memory limit of the launch and each replica. The launch installs dependencies. In MB (2**20
    bytes)."""

    cpus: float | None
    """CPU limit of each replica, on an engine."""

    base: str
    """Image that those built for engines are based on [python:3.11-slim]."""

    sandbox: bool
    """On an engine: read-only root, no capabilities. No new privileges either."""

    engine_options: list[str]
    """An option of the engine's own: shm-size=1g."""

    ready_timeout_seconds: float
    """Fail when it is not ready by then. In seconds [600.0]."""


class RolloutOptions(RequestOptions, total=False):
    """How episodes are played and written."""

    episodes: int
    """Number of episodes [256]."""

    concurrency: int
    """Number of episodes at once [64]."""

    policy: str
    """module:function, openai:URL, or random [random]."""

    max_steps: int
    """Maximum number of steps in an episode [100]."""

    step_timeout_seconds: float
    """Time limit of a reset or step. In seconds [60.0]."""

    policy_timeout_seconds: float | None
    """Time limit of a policy call. In seconds."""

    episode_timeout_seconds: float | None
    """Time limit of an episode. In seconds."""

    retries: int
    """Further attempts at an episode that fails [2]."""

    seed: int | None
    """Seed of the first episode. Each further episode, or group, adds 1."""

    reset: dict[str, Any]
    """Further arguments of each reset."""

    group: int | None
    """N episodes each begin alike, to be compared."""

    advantages: str | None
    """How a group's advantages are computed. group-normalised (the default with --group), leave-
    one-out, centred, module:function."""

    filters: list[str]
    """Which episodes to keep: min-steps=N, max-reward=R. Also max-steps=N, min-reward=R; or which
    to drop: failed, zero-advantage, what module:function says."""

    keep_failed: bool
    """Write failed episodes, too."""

    keep_cached: bool
    """Leave large files in the page cache, for an immediate reader."""

    buffer_mb: int
    """Memory limit between sessions and disk. In MB (2**20 bytes) [256]."""

    max_loop_lag_seconds: float | None
    """Fail when the event loop was blocked for longer. In seconds."""

    env: dict[str, str]
    """A variable for the policy."""

    memory_mb: int | None
    """Memory limit of the rollout. In MB (2**20 bytes)."""
