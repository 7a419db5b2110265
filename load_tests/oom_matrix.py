# SPDX-License-Identifier: Apache-2.0
"""Every way to die, on both schedules, in guaranteed and burst workers.

Each cell kills one task in a real worker, and asks for four things: the right reason; a neighbour
of the same pool that goes on; a fresh worker that runs the next task; and the time from the death
to the event that explains it. `tests/load/test_oom_matrix.py` runs the same cells as tests.

The two ways that need the kernel need memory cgroups; without them those cells are left out, and
the report says why. The watchdog's way is taken in an executor that makes no cgroups.

The peer in the same run is a `ProcessPoolExecutor` (pool_peer.py), asked the same of the ways that
need neither limits nor time-outs, of which it has none. SkyPilot's workers run in such pools.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.peers.pool_peer import DEATHS, POOL, one_death
from load_tests.shared.operations import worker_path
from load_tests.shared.report import Report, parse_arguments
from openenvd.executor import BurstableExecutor, Plan
from openenvd.executor.messages import (
    LONG,
    SHORT,
    Cancelled,
    Died,
    ExecutorEvent,
    Progressed,
    Raised,
    Started,
    Succeeded,
    Task,
)
from openenvd.processes.exits.exit_reason import Certainty, Detector, ExitKind, ExitReason
from openenvd.system.cgroups import CgroupManager
from openenvd.system.units import MB

WORKER_BYTES = 96 * MB
TOO_MUCH_BYTES = 300 * MB
TIMEOUT_SECONDS = 0.3
PATIENCE_SECONDS = 30.0
FINAL = (Succeeded, Raised, Died, Cancelled)


@dataclass(frozen=True)
class Way:
    """One way to die: what the task does, what is done to it, and what must be said of it."""

    name: str
    operation: str
    payload: dict[str, Any]
    kind: ExitKind
    detector: Detector | None = None
    number: int | None = None  # the signal
    code: int | None = None  # the exit code
    timeout_seconds: float | None = None
    kill_by_hand: bool = False
    needs_cgroups: bool = False
    without_cgroups: bool = False
    # Certain only if the kernel log names its cgroup, which it does at most ten times in 5 s (else
    # its parent might have failed of something else).
    by_grandchild: bool = False

    def fits(self, reason: ExitReason) -> bool:
        """Whether that is what happened, told apart from what is only probable."""
        return (
            reason.kind is self.kind
            and reason.detector is self.detector
            and reason.certainty in self.certainties
            and (self.number is None or reason.signal_number == self.number)
            and (self.code is None or reason.exit_code == self.code)
        )

    @property
    def certainties(self) -> frozenset[Certainty]:
        """How sure one may be of it."""
        return frozenset(Certainty) if self.by_grandchild else frozenset({Certainty.CERTAIN})


OOM, SIGNALED = ExitKind.OOM_KILLED, ExitKind.SIGNALED
WAYS = (
    Way(
        "kernel kills the worker",
        "hold",
        {"bytes": TOO_MUCH_BYTES},
        OOM,
        Detector.CGROUP,
        needs_cgroups=True,
    ),
    Way(
        "kernel kills a grandchild",
        "hold_below",
        {"bytes": TOO_MUCH_BYTES},
        OOM,
        Detector.CGROUP,
        needs_cgroups=True,
        by_grandchild=True,
    ),
    Way(
        "watchdog",
        "hold",
        {"bytes": TOO_MUCH_BYTES},
        OOM,
        Detector.WATCHDOG,
        without_cgroups=True,
    ),
    Way("MemoryError", "raise_memory_error", {}, OOM, Detector.MEMORY_ERROR),
    Way("kill -9 by hand", "hang", {}, SIGNALED, number=signal.SIGKILL, kill_by_hand=True),
    Way("segmentation fault", "segfault", {}, SIGNALED, number=signal.SIGSEGV),
    Way("exit code", "exit_at_once", {"code": 7}, ExitKind.EXITED, code=7),
    Way("hang past its time-out", "hang", {}, ExitKind.TIMED_OUT, timeout_seconds=TIMEOUT_SECONDS),
)
SCHEDULES = (LONG, SHORT)
PLACES = ("guaranteed", "burst")


@dataclass
class Cell:
    """What one death showed."""

    reason: ExitReason | None
    right_reason: bool
    neighbour_unharmed: bool
    fresh_worker: bool
    seconds: float  # from the start of the task to its explanation

    @property
    def good(self) -> bool:
        return self.right_reason and self.neighbour_unharmed and self.fresh_worker


def why_no_cgroups() -> str | None:
    """None where the machine lets us make memory cgroups."""
    manager = CgroupManager(f"oom-matrix-{os.getpid()}")
    manager.remove()
    return None if manager.available else manager.why_not


def run_cell(way: Way, schedule: str, place: str) -> Cell:
    """One death, in an executor of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="openenvd-load-") as home,
        _Bench(home, place, use_cgroups=not way.without_cgroups) as bench,
    ):
        neighbour = bench.submit("hang", {}, schedule)
        bench.wait(Progressed, neighbour)
        began = time.monotonic()
        victim = bench.submit(
            way.operation, way.payload, schedule, timeout_seconds=way.timeout_seconds
        )
        started = bench.wait(Started, victim)
        if way.kill_by_hand:
            bench.wait(Progressed, victim)
            os.kill(started.pid, signal.SIGKILL)
        outcome = bench.wait(FINAL, victim)
        seconds = time.monotonic() - began
        after = bench.submit("moment", {}, schedule)
        fresh = bench.wait(FINAL, after)
        reason = outcome.exit if isinstance(outcome, Died) else None
        return Cell(
            reason,
            right_reason=reason is not None and way.fits(reason),
            neighbour_unharmed=not bench.of(FINAL, neighbour),
            fresh_worker=isinstance(fresh, Succeeded) and bench.is_fresh(after, started),
            seconds=seconds,
        )


class _Bench:
    """An executor with one free worker, of the wanted kind, beside the neighbour's."""

    def __init__(self, home: str, place: str, *, use_cgroups: bool) -> None:
        worker_path()
        guaranteed, burst = (2, 0) if place == "guaranteed" else (1, 1)
        self._home = Path(home)
        self._events: list[Any] = []
        self._heard = threading.Condition()
        self._executor = BurstableExecutor(
            Plan(guaranteed, guaranteed, burst, burst, 2**32, 0, worker_bytes=WORKER_BYTES),
            preload=["load_tests.shared.operations"],
            home=home,
            on_event=self._hear,
            cancel_grace_seconds=1.0,
            use_cgroups=use_cgroups,
        )

    def __enter__(self) -> _Bench:
        self._executor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.stop(grace_seconds=0.0)

    def submit(
        self,
        operation: str,
        payload: dict[str, Any],
        schedule: str,
        timeout_seconds: float | None = None,
    ) -> str:
        task_id = f"{schedule}-{operation}-{time.monotonic_ns()}"
        name = f"load_tests.shared.operations:{operation}"
        log_path = str(self._home / f"{task_id}.log")
        task = Task(task_id, name, payload, schedule, log_path, timeout_seconds=timeout_seconds)
        self._until(lambda: self._executor.room(schedule) > 0)
        with self._heard:  # what is told meanwhile came later
            if (started := self._executor.submit(task)) is not None:
                self._hear(started)
        return task_id

    def of(self, kind: Any, task_id: str) -> list[Any]:
        return [e for e in self._events if isinstance(e, kind) and e.task_id == task_id]

    def wait(self, kind: Any, task_id: str) -> Any:
        self._until(lambda: self.of(kind, task_id))
        return self.of(kind, task_id)[0]

    def is_fresh(self, task_id: str, before: Started) -> bool:
        """Whether another process runs the task (after a `MemoryError`, too)."""
        return bool(self.wait(Started, task_id).pid != before.pid)

    def _hear(self, event: ExecutorEvent) -> None:
        with self._heard:
            self._events.append(event)
            self._heard.notify_all()

    def _until(self, fact: Callable[[], Any]) -> None:
        with self._heard:
            if not self._heard.wait_for(fact, PATIENCE_SECONDS):
                raise TimeoutError(f"waited in vain; the last events: {self._events[-5:]}")


def main() -> int:
    """All cells, again and again."""
    options = parse_arguments("Every way to die.", repetitions=3)
    report = Report("Every way to die: right reason, unharmed neighbour, fresh worker")
    without = why_no_cgroups()
    ways = [way for way in WAYS if not (way.needs_cgroups and without)]
    bad = []
    all_cells: list[Cell] = []
    for way, schedule, place in _cells(ways):
        cells = [run_cell(way, schedule, place) for _ in range(options.repetitions)]
        all_cells += cells
        name = f"{way.name}, {schedule}, {place}"
        report.add(name, "s", [cell.seconds for cell in cells])
        bad += [f"{name}: {cell}" for cell in cells if not cell.good]
    count = len(report.measures) * options.repetitions
    typical = statistics.median([m.values[0] for m in report.measures])
    report.note(f"{count - len(bad)} of {count} deaths explained rightly, neighbours unharmed.")
    report.note(f"From a task's start to the explanation of its death: {typical:.3f} s typically.")
    _add_peer(report, all_cells)
    if without:
        report.note(f"Left out, no memory cgroups here: {without}")
    for line in bad:
        report.note(f"WRONG  {line}")
    report.finish(options.json)
    return 1 if bad else 0


def _add_peer(report: Report, cells: list[Cell]) -> None:
    """Shares of deaths, ours and the pool's."""
    deaths = {name: one_death(name) for name in DEATHS}
    pool = list(deaths.values())
    columns = [
        (
            "deaths that harmed the neighbour",
            [not cell.neighbour_unharmed for cell in cells],
            [not death.neighbour_unharmed for death in pool],
        ),
        (
            "deaths after which the next task ran",
            [cell.fresh_worker for cell in cells],
            [death.next_runs for death in pool],
        ),
        (
            "deaths rightly explained",
            [cell.right_reason for cell in cells],
            [death.names_its_cause for death in pool],
        ),
    ]
    for name, ours, peers in columns:
        others = {POOL: [_percent(peers)]}
        report.beside(name, "%", [_percent(ours)], others, more_is_better=True)
    for name, death in deaths.items():
        report.note(f"{POOL}, {name}: {death.said}")


def _percent(facts: list[bool]) -> float:
    return 100 * sum(facts) / len(facts)


def _cells(ways: list[Way]) -> Iterator[tuple[Way, str, str]]:
    for way in ways:
        for schedule in SCHEDULES:
            for place in PLACES:
                yield way, schedule, place


if __name__ == "__main__":
    sys.exit(main())
