# SPDX-License-Identifier: Apache-2.0
"""The plan of a measurement: a grid of batch sizes and waits, and how often each is measured.

A session that fails is a result, not an error. The numbers are checked by the caller: the payload
of `server/operations/benchmark.py`, or a load test's command line.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...system.text.json_lines import Json

HANDSHAKE_SECONDS = 10.0  # as upstream's client gives it (`connect_timeout_s`)
_SPARE_FILES = 64  # of a generator, beside its sockets


class Cell(NamedTuple):
    """One batch."""

    requests: int
    wait_seconds: float
    repetition: int  # from 1

    def __str__(self) -> str:
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
        return map(Cell._make, product(self.requests_grid, self.wait_grid, repetitions))

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
