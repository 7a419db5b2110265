# SPDX-License-Identifier: Apache-2.0
"""A measurement: a crew of load generators runs every cell of the grid on every target.

    Plan     the grid: batch sizes, waits, repetitions; the caller checks its numbers
    Sweep    for each cell, for each target (in an order that rotates by repetition): one batch
    Crew     ──one pipe each──▶ generator 0..n-1 ──thousands of sockets──▶ server

Targets alternate within the same minute, so that a change of the machine's speed affects all.
While a batch runs, the crew is blocked in a read and takes no CPU from the server under test. A
generator exits when its stdin ends, so none outlives its crew.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple, Self

import orjson

from ...schema.errors import OperationFailed
from ...system.text.json_lines import Json
from .generator import HANDSHAKE_SECONDS, Batch
from .results import Report, Summary, Target, cpu_seconds, read_drops, results_of, usable_cores

START_SECONDS = 180.0  # for a generator to import what it needs; upstream's client: 8 s of CPU
HEAD_START_SECONDS = 0.05  # from `go` to the first connection, so that every generator has read it
MARGIN_SECONDS = 30.0  # beyond a batch's own time-out, to report outcomes
PORTS_OF_AN_ADDRESS = 20_000  # of one source address towards one server, with room to spare
_SPARE_FILES = 64  # of a generator, beside its sockets
PAUSE_SECONDS = 0.5  # between two batches, for sessions to end, as in the seed

OnProgress = Callable[[str, int, int], None]  # the present phase; finished batches, all batches


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
    action: Json | None = None  # None: `{"wait_seconds": …}`, for the benchmark environment
    timeout_seconds: float = 120.0  # of a session, beyond its wait
    generators: int | None = None  # None: enough for the cores and the open files
    window: int = 0  # handshakes under way at once, all generators together; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade

    def cells(self) -> Iterator[Cell]:
        """List every batch, small ones first."""
        repetitions = range(1, self.repetitions + 1)
        return map(Cell._make, product(self.requests_grid, self.wait_grid, repetitions))

    @property
    def crew_size(self) -> int:
        """Return the number of generators."""
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # once the limit is raised
        files = 2**20 if files == resource.RLIM_INFINITY else files
        return self.generators or crew_size(max(self.requests_grid), usable_cores(), files)


def crew_size(largest: int, cores: int, files: int) -> int:
    """Return a number of generators: one for every two cores, at least two on several cores.

    It is larger if their open files would not suffice.
    """
    by_files = -(-largest // max(1, files - _SPARE_FILES))
    return max(min(2, cores), cores // 2, by_files) if largest > 1 else 1


class GeneratorLost(OperationFailed):
    """A generator exited early: nothing was measured."""


@dataclass
class Sweep:
    """One running measurement."""

    plan: Plan
    targets: Sequence[Target]
    folder: Path
    on_progress: OnProgress = lambda *_: None
    on_summary: Callable[[Summary], None] = lambda _: None
    program: Sequence[str] = ()  # that makes the load; empty: our own generator

    def __post_init__(self) -> None:
        self.report = Report(self.plan, folder=self.folder)

    def run(self) -> list[Path]:
        """Measure everything; return the paths of all files."""
        batches: list[tuple[Cell, Target]] = []
        for cell in self.plan.cells():
            first = (cell.repetition - 1) % max(1, len(self.targets))
            batches += [(cell, each) for each in [*self.targets[first:], *self.targets[:first]]]
        with Crew(self.plan.crew_size, self.program) as crew:
            for number, (cell, target) in enumerate(batches):
                self.on_progress(str(cell), number, len(batches))
                if number:
                    time.sleep(PAUSE_SECONDS)
                self._measure(crew, cell, target)
        self.on_progress("writing", len(batches), len(batches))
        return self.report.write()

    def _measure(self, crew: Crew, cell: Cell, target: Target) -> None:
        action = self.plan.action
        batch = Batch(
            host=target.host,
            port=target.port,
            path=target.path,
            token=target.token,
            others=target.others,
            count=cell.requests,
            action={"wait_seconds": cell.wait_seconds} if action is None else action,
            timeout_seconds=self.plan.timeout_seconds + cell.wait_seconds,
            window=self.plan.window,
            handshake_seconds=self.plan.handshake_seconds,
        )
        used_before, dropped_before = cpu_seconds(target), read_drops()
        reports = crew.run(batch)
        used, dropped = cpu_seconds(target) - used_before, read_drops()
        drops = None if dropped is None or dropped_before is None else dropped - dropped_before
        rows, summary = results_of(reports, cell, target, used, drops)
        self.report.add(rows, summary)
        self.on_summary(summary)


class Crew:
    """A set of generators; a context manager that stops them all.

    Args:
        program: A command that replaces our own generator, and reads and writes the same lines.
    """

    def __init__(self, size: int, program: Sequence[str] = ()) -> None:
        self._size = size
        self._program = program or (sys.executable, "-P", "-m", f"{__package__}.generator")
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        try:
            for _ in range(self._size):
                self._processes.append(subprocess.Popen(self._program, stdin=pipe, stdout=pipe))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError), process:
                pass  # `Popen` has closed its pipes and waited for it

    def run(self, batch: Batch) -> list[Json]:
        """Run one batch: each generator takes its share, and its report is returned.

        Raises:
            GeneratorLost: One has exited, or all were killed because one did not answer in time.
        """
        shares = shares_of(batch, self._size)
        self._ask([{"batch": asdict(share)} for share in shares], "prepared", START_SECONDS)
        go = {"go": time.monotonic() + HEAD_START_SECONDS}
        return self._ask([go] * self._size, "done", batch.timeout_seconds + MARGIN_SECONDS)

    def _ask(self, messages: Sequence[Json], name: str, seconds: float) -> list[Any]:
        """Write one message to each generator, and return the answers."""
        for process, message in zip(self._processes, messages, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has exited, which the read below reports
                process.stdin.write(orjson.dumps(message) + b"\n")
                process.stdin.flush()
        timer = Timer(seconds, self._kill)  # ends the reads
        timer.start()
        try:
            return [orjson.loads(_line_of(process))[name] for process in self._processes]
        finally:
            timer.cancel()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line
    raise GeneratorLost(
        f"a load generator ended with exit code {process.wait()}",
        "the end of its output is in the log; too little memory is the usual cause",
    )


def shares_of(batch: Batch, members: int) -> list[Batch]:
    """Divide a batch as evenly as possible; shares take the server's addresses in turn.

    Each share has source addresses of its own on loopback: one address has some 28,000 ports
    towards a server, and a used port stays in TIME_WAIT for a minute.
    """
    addresses = ((batch.host, batch.port), *batch.others)
    window = max(1, batch.window // members) if batch.window else 0
    shares = []
    for number in range(members):
        host, port = addresses[number % len(addresses)]
        count = batch.count // members + (number < batch.count % members)
        is_loopback = host.startswith("127.") and sys.platform == "linux"
        own = range(4 + count // PORTS_OF_AN_ADDRESS) if is_loopback else ()
        sources = tuple(f"127.0.{number + 1}.{last + 1}" for last in own)
        share = replace(batch, host=host, port=port, others=(), count=count, window=window)
        shares.append(replace(share, sources=sources))
    return shares
