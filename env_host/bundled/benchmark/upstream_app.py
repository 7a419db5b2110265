# SPDX-License-Identifier: Apache-2.0
"""The benchmark on upstream's base classes, as an app of upstream's own `create_app`.

    uvicorn --app-dir envs benchmark.upstream_app:app --workers 4

It imports nothing of openenvd, so that a Python that has upstream's package alone can serve it. As
in the seed, `MAX_CONCURRENT_ENVS` (100) bounds the sessions of each worker.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from .behaviour import SeenFields, WaitFields, Waits, WaitsOnLoop, is_synchronous

# By name: upstream's package is not among what openenvd is checked and built with.
_types: Any = importlib.import_module("openenv.core.env_server.types")
_interfaces: Any = importlib.import_module("openenv.core.env_server.interfaces")
_http_server: Any = importlib.import_module("openenv.core.env_server.http_server")


class BenchmarkAction(WaitFields, _types.Action):  # type: ignore[misc]
    """The time to wait."""


class BenchmarkObservation(SeenFields, _types.Observation):  # type: ignore[misc]
    """The process that waited, and its time."""


class SyncBenchmarkEnvironment(Waits, _interfaces.Environment):  # type: ignore[misc]
    """Blocks the session's thread while it waits."""

    observation_cls = BenchmarkObservation
    state_cls = _types.State


class BenchmarkEnvironment(WaitsOnLoop, _interfaces.Environment):  # type: ignore[misc]
    """Waits on the event loop."""

    observation_cls = BenchmarkObservation
    state_cls = _types.State


app = _http_server.create_app(
    SyncBenchmarkEnvironment if is_synchronous() else BenchmarkEnvironment,
    BenchmarkAction,
    BenchmarkObservation,
    env_name="benchmark",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "100")),
)
