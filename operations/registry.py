# SPDX-License-Identifier: Apache-2.0
"""The registry of operations: one line each.

The HTTP edge reads their classes; a worker gets a dotted name and finds the operation here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .base import Operation, OperationContext
from .benchmark import Benchmark
from .build_image import BuildImage
from .check import Check
from .describe import Describe
from .down import Down
from .down_strays import DownStrays
from .environment_test import EnvironmentTest
from .launch import Launch
from .probe import Probe
from .prune import Prune
from .rollout import Rollout
from .scale import Restart, Scale

OPERATIONS: tuple[type[Operation], ...] = (
    Launch,
    Benchmark,
    EnvironmentTest,
    BuildImage,
    Down,
    DownStrays,
    Check,
    Describe,
    Probe,
    Prune,
    Rollout,
    Scale,
    Restart,
)

# What the zygote imports, so that workers find it in memory; also what operations import late,
# of which every worker would otherwise keep a copy of its own.
PRELOAD: tuple[str, ...] = (
    __name__,
    "openenvd.environments.providers.local",
    "openenvd.system.cgroups",
    "openenvd.processes.resources.limits",
)

_BY_NAME = {operation.name: operation for operation in OPERATIONS}

Progress = Callable[[dict[str, Any]], None]


def by_name(name: str) -> type[Operation]:
    """The operation of that name.

    Raises:
        KeyError: there is none.
    """
    return _BY_NAME[name]


def dotted_name(operation: type[Operation]) -> str:
    """What the executor is given: `package.module:callable`."""
    return f"{__name__}:run.{operation.name}"


def expected_bytes() -> dict[str, int]:
    """Return the bytes that the plan reserves for each guaranteed worker, by schedule.

    They are those of the schedule's first operation. A request that needs more waits until there is
    room (`executor.policy.admission`).
    """
    expected: dict[str, int] = {}
    for operation in OPERATIONS:
        expected.setdefault(operation.schedule, operation.expected_bytes)
    return expected


class _Run:
    """`run.launch(payload, request_id, home, progress)`: an operation as a worker calls it."""

    def __getattr__(self, name: str) -> Callable[[dict[str, Any], str, str, Progress], Any]:
        if name not in _BY_NAME:
            raise AttributeError(f"there is no operation {name!r}")
        operation = _BY_NAME[name]

        def call(payload: dict[str, Any], request_id: str, home: str, progress: Progress) -> Any:
            context = OperationContext(request_id, Path(home), progress)
            return operation.run(operation.Payload.model_validate(payload), context)

        return call


run = _Run()
