# SPDX-License-Identifier: Apache-2.0
"""The registry of operations: one line each.

The HTTP edge reads their classes; a worker gets the dotted name of one.
"""

from __future__ import annotations

from .base import Operation
from .benchmark import Benchmark
from .check import Check, Probe
from .environment_test import EnvironmentTest
from .launch import BuildImage, Launch
from .replicas import Down, DownStrays, Prune, Restart, Scale
from .rollout import Rollout

_ALL: tuple[type[Operation], ...] = (
    Launch,
    Benchmark,
    EnvironmentTest,
    BuildImage,
    Down,
    DownStrays,
    Check,
    Probe,
    Prune,
    Rollout,
    Scale,
    Restart,
)

OPERATIONS = {operation.name: operation for operation in _ALL}

# The zygote imports these, so that all workers share them in memory. Modules that operations
# import late are among them, since each worker would otherwise keep its own copy.
PRELOAD: tuple[str, ...] = (
    __name__,
    "openenvd.environments.engines.local.provider",
    "openenvd.system.memory.cgroups",
    "openenvd.system.memory.limits",
)


def dotted_name(operation: type[Operation]) -> str:
    """Return `package.module:callable` for the executor; empty if it needs no worker."""
    has_worker = "run" in vars(operation)
    return f"{operation.__module__}:{operation.__name__}.call" if has_worker else ""


def expected_bytes() -> dict[str, int]:
    """Return the bytes that the plan reserves for each guaranteed worker, by schedule.

    They are those of the schedule's first operation. A request that needs more waits until there is
    room (`executor.policy.memory`).
    """
    expected: dict[str, int] = {}
    for operation in OPERATIONS.values():
        expected.setdefault(operation.schedule, operation.expected_bytes)
    return expected
