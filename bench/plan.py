# SPDX-License-Identifier: Apache-2.0
"""What is to be measured: a grid of batch sizes and waits, how often, and over which protocol."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from .errors import InvalidPlan

Json = dict[str, Any]

MODES = ("ws", "http")
MAX_REQUESTS = 200_000
MAX_WAIT_SECONDS = 3600.0
MAX_REPETITIONS = 100
DEFAULT_TIMEOUT_SECONDS = 120.0
HANDSHAKE_SECONDS = 10.0  # as upstream's client gives it (`connect_timeout_s`)
GENTLE_WINDOW = 1024  # half of uvicorn's queue of connections, a quarter of ours
_SPARE_FILES = 64  # of a generator, beside its sockets


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch."""

    mode: str
    requests: int
    wait_seconds: float
    repetition: int  # from 1

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"{self.mode}, {self.requests} sessions, wait {self.wait_seconds:g} s, "
            f"repetition {self.repetition}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole grid; checked when it is made."""

    requests_grid: tuple[int, ...]
    wait_grid: tuple[float, ...] = (1.0,)
    repetitions: int = 1
    modes: tuple[str, ...] = ("ws",)
    action: Json | None = None  # None: `{"wait_seconds": …}`, as the benchmark environment wants
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS  # of a session, beyond its wait
    generators: int | None = None  # None: enough for the cores and the open files
    window: int = 0  # handshakes under way at once, all generators together; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade
    weighs: bool = True  # also measures what the sessions of the largest batch hold

    def __post_init__(self) -> None:
        check_grid("requests", self.requests_grid, 1, MAX_REQUESTS)
        check_grid("wait", self.wait_grid, 0, MAX_WAIT_SECONDS)
        check_grid("repetitions", (self.repetitions,), 1, MAX_REPETITIONS)
        if not self.modes or any(mode not in MODES for mode in self.modes):
            raise InvalidPlan(f"the mode is one of {', '.join(MODES)}, not {self.modes!r}")
        if min(self.timeout_seconds, self.handshake_seconds) <= 0 or self.window < 0:
            raise InvalidPlan("time-outs must be positive, and the window no less than 1")

    def cells(self) -> Iterator[Cell]:
        """Every batch, small ones first."""
        repetitions = range(1, self.repetitions + 1)
        for cell in product(self.modes, self.requests_grid, self.wait_grid, repetitions):
            yield Cell(*cell)

    @property
    def largest(self) -> int:
        """Sessions of the largest batch."""
        return max(self.requests_grid)

    @property
    def sessions_to_weigh(self) -> int:
        """How many are held open while memory is read."""
        return self.largest if self.weighs and "ws" in self.modes else 0

    @property
    def crew_size(self) -> int:
        """How many generators."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # once the limit is raised
        files = 2**20 if files == resource.RLIM_INFINITY else files
        return self.generators or crew_size(self.largest, cores, files)


def check_grid(name: str, values: tuple[float, ...], least: float, most: float) -> None:
    """Whether there is anything in it, and all of it can be done."""
    if not values:
        raise InvalidPlan(f"the grid of {name} is empty", "write numbers: 32,128,512")
    for value in values:
        if not least <= value <= most:  # also what is no number
            raise InvalidPlan(f"{name}: {value:g} is not within {least:g} to {most:g}")


def crew_size(largest: int, cores: int, files: int) -> int:
    """One generator for every two cores, at least two where they can run side by side.

    More where their open files would not do.
    """
    by_files = -(-largest // max(1, files - _SPARE_FILES))
    return max(min(2, cores), cores // 2, by_files) if largest > 1 else 1
