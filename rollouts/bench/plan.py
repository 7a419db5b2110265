# SPDX-License-Identifier: Apache-2.0
"""What is to be measured: a grid of batch sizes and waits, and how often; and what can go wrong.

A session that fails is a result, not an error.

Who asks checks the numbers: the payload of `server/operations/benchmark.py`, a load test's command
line.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ...system.text.json_lines import Json

HANDSHAKE_SECONDS = 10.0  # as upstream's client gives it (`connect_timeout_s`)
_SPARE_FILES = 64  # of a generator, beside its sockets


class BenchError(Exception):
    """Base of this room's errors: `hint` says what to do next, `kind` how the request ends."""

    kind: str = "operation_error"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidPlan(BenchError):
    """The environment cannot do what the plan asks."""

    kind = "invalid"


class GeneratorLost(BenchError):
    """A generator exited early: nothing was measured."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch."""

    requests: int
    wait_seconds: float
    repetition: int  # from 1

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.requests} sessions, wait {self.wait_seconds:g} s, #{self.repetition}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole grid."""

    requests_grid: tuple[int, ...]
    wait_grid: tuple[float, ...] = (1.0,)
    repetitions: int = 1
    action: Json | None = None  # None: `{"wait_seconds": …}`, as the benchmark environment wants
    timeout_seconds: float = 120.0  # of a session, beyond its wait
    generators: int | None = None  # None: enough for the cores and the open files
    window: int = 0  # handshakes under way at once, all generators together; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade

    def cells(self) -> Iterator[Cell]:
        """Every batch, small ones first."""
        repetitions = range(1, self.repetitions + 1)
        for cell in product(self.requests_grid, self.wait_grid, repetitions):
            yield Cell(*cell)

    @property
    def largest(self) -> int:
        """Sessions of the largest batch."""
        return max(self.requests_grid)

    @property
    def crew_size(self) -> int:
        """How many generators."""
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # once the limit is raised
        files = 2**20 if files == resource.RLIM_INFINITY else files
        return self.generators or crew_size(self.largest, usable_cores(), files)


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def crew_size(largest: int, cores: int, files: int) -> int:
    """One generator for every two cores, at least two where they can run side by side.

    More where their open files would not do.
    """
    by_files = -(-largest // max(1, files - _SPARE_FILES))
    return max(min(2, cores), cores // 2, by_files) if largest > 1 else 1
