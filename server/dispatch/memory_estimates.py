# SPDX-License-Identifier: Apache-2.0
"""The memory that requests are expected to need, and the plan for this machine that follows.

An estimate is learned from the peaks of earlier requests. Each pair of an operation and an
environment's source has one: a `launch` of a compiler differs from a `launch` of `echo`, but two
launches of `echo` under different names share theirs. `estimate` is pure.

Owned by the dispatcher's thread.

Imports little: a daemon that is too large for its machine must find out before it has grown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...executor.errors import PlanError
from ...executor.policy.plan import Plan, plan_workers
from ...requests_db.records import MemoryEstimate, PeakSample, Request
from ...schema.settings import Settings
from ...system.memory.limits import Limits, ProcessRoom
from ...system.text.units import MB
from ..errors import DaemonError

if TYPE_CHECKING:
    from ..operations.base import Operation

MAX_SAMPLES = 20
MIN_BYTES = 8 * MB
UNKNOWN_BYTES = 256 * MB  # at most, for the launch of a source that was never launched
UNKNOWN_AT_ONCE = 4

Key = tuple[str, str]  # an operation, and the source of the environment

_QUANTILE = 0.9
_DECAY = 0.9  # the factor by which each later run lowers the weight of a run
# Added to that quantile: the minimum plus the spread of the peaks, but at most the maximum. Fewer
# runs than `_FEW_RUNS` have no spread, so the maximum is added.
_MAX_MARGIN = 0.15
_MIN_MARGIN = 0.04
_FEW_RUNS = 3
_KILLED_FACTOR = 1.5  # a process that was killed at its peak would have grown further


def estimate(samples: Iterable[PeakSample], *, default_bytes: int, most_bytes: int) -> int:
    """Return a high quantile of the samples (oldest first; the latest weigh most), plus a `margin`.

    It is between `MIN_BYTES` and `most_bytes`; without samples, it is at most `default_bytes`.
    """
    newest_first = list(samples)[::-1]
    if not newest_first:
        return min(default_bytes, most_bytes)
    weighed = sorted(
        (int(s.peak_bytes * (_KILLED_FACTOR if s.killed else 1)), _DECAY**age)
        for age, s in enumerate(newest_first)
    )
    enough = _QUANTILE * math.fsum(weight for _, weight in weighed)
    sums = itertools.accumulate(weight for _, weight in weighed)
    # If the last sum falls short by rounding, use the highest sample.
    reached = next((i for i, total in enumerate(sums) if total >= enough), len(weighed) - 1)
    enlarged = weighed[reached][0] * (1.0 + margin([needed for needed, _ in weighed]))
    return min(most_bytes, max(MIN_BYTES, int(enlarged)))


def margin(needed: list[int]) -> float:
    """Return the share to add: little if all runs needed the same, so that one more may fit."""
    if len(needed) < _FEW_RUNS:
        return _MAX_MARGIN
    spread = (max(needed) - min(needed)) / max(1, max(needed))
    return min(_MAX_MARGIN, _MIN_MARGIN + spread)


def left_bytes(result: Any) -> int:
    """Return the largest memory of the replicas that a launch has left running, by its result."""
    environment = result.get("environment") if isinstance(result, dict) else None
    replicas = environment.get("replicas") if isinstance(environment, dict) else None
    held = [replica.get("memory_bytes") or 0 for replica in replicas or ()]
    return max(held, default=0)


def source_of(request: Request) -> str:
    """Return the source of the request's environment; "" when it makes none."""
    return str(request.payload.get("source") or "")


class MemoryEstimates:
    """All estimates."""

    def __init__(
        self,
        declared: Mapping[str, type[Operation]] | None = None,
        known: Iterable[MemoryEstimate] = (),
        *,
        most_bytes: int = 2**62,
    ) -> None:
        """The operations, by name, declare estimates; none is above `most_bytes`, the budget."""
        self._declared = dict(declared or {})
        self._most_bytes = most_bytes
        self._samples: dict[Key, tuple[PeakSample, ...]] = {}
        self._estimates: dict[Key, int] = {}
        self._largest: dict[str, int] = {}
        self.accept(known)

    def of(self, request: Request, running: int = 0) -> int:
        """Estimate the bytes that the request needs, including the replicas that it leaves.

        As many of these as are `running` already need none. A retry after a kill has its own
        `memory_bytes`, which are returned.
        """
        if request.memory_bytes is not None:
            return request.memory_bytes
        if not request.payload:  # frequent, and faster so
            return self._of((request.operation, ""))
        key = (request.operation, source_of(request))
        expected = each = self._of(key)
        if key not in self._estimates:  # only one replica is assumed to be large
            declared = self._declared.get(request.operation)
            each = 0 if declared is None else declared.leaves_bytes
        asked = asked_bytes(request)
        if asked is not None:
            expected = min(expected, 2 * asked)  # the launch, and the replica
            each = min(each, asked)
        count = int(request.payload.get("replicas") or 1) - running
        return expected + each * (count - 1) if count > 0 else 0

    def largest(self, schedule: str) -> int:
        """Return the largest estimate of `schedule`'s requests, without further replicas."""
        if schedule not in self._largest:
            others = {name for name, d in self._declared.items() if d.schedule != schedule}
            sizes = [size for key, size in self._estimates.items() if key[0] not in others]
            sizes += [d.expected_bytes for name, d in self._declared.items() if name not in others]
            self._largest[schedule] = max(sizes, default=MIN_BYTES)
        return self._largest[schedule]

    def typical(self, schedule: str) -> int:
        """Estimate the bytes of an average request: the largest median of the operations."""
        from statistics import median

        sizes = []
        for name, declared in self._declared.items():
            if declared.schedule == schedule:
                known = [size for key, size in self._estimates.items() if key[0] == name]
                default = declared.expected_bytes + declared.leaves_bytes
                sizes.append(int(median(known)) if known else default)
        return max(sizes, default=MIN_BYTES)

    def peaks_of(self, request: Request) -> list[int]:
        """Return the peaks of the latest runs that were not killed, oldest first."""
        samples = self._samples.get((request.operation, source_of(request)), ())
        return [sample.peak_bytes for sample in samples if not sample.killed]

    def learned(
        self, samples: Iterable[tuple[Request, PeakSample]], now: float
    ) -> list[MemoryEstimate]:
        """Return new estimates after these samples; they apply once they are `accept`ed."""
        found: dict[Key, tuple[PeakSample, ...]] = {}
        for request, sample in samples:
            key = (request.operation, source_of(request))
            before = found.get(key) or self._samples.get(key, ())
            found[key] = (*before, sample)[-MAX_SAMPLES:]
        return [MemoryEstimate(*key, kept, now) for key, kept in found.items()]

    def accept(self, expectations: Iterable[MemoryEstimate]) -> None:
        """Apply these estimates from now on."""
        for each in expectations:
            key = (each.operation, each.source)
            self._samples[key] = each.samples
            default = self._default_of(key)
            expected = estimate(each.samples, default_bytes=default, most_bytes=self._most_bytes)
            if self._estimates.get(key) != expected:
                self._estimates[key] = expected
                self._largest = {}

    def _of(self, key: Key) -> int:
        known = self._estimates.get(key)
        return min(self._default_of(key), self._most_bytes) if known is None else known

    def _default_of(self, key: Key) -> int:
        declared = self._declared.get(key[0])
        if declared is None:
            return MIN_BYTES
        if not declared.leaves_bytes:
            return declared.expected_bytes
        # Until a new environment has been measured, few are launched at once.
        unknown = min(UNKNOWN_BYTES, self._most_bytes // UNKNOWN_AT_ONCE)
        return max(unknown, declared.expected_bytes + declared.leaves_bytes)


def asked_bytes(request: Request) -> int | None:
    """Return the cap that the user requested with `--memory`."""
    asked = request.payload.get("memory_mb")
    return int(asked * MB) if isinstance(asked, int | float) else None


DAEMON_BYTES = 64 * MB  # the private memory of the daemon, its zygote and one idle worker
# Besides the daemon itself: its zygote, a worker of each schedule, and its threads (dispatcher,
# supervisor, lag, and some that read files).
PROCESSES_OF_DAEMON = 10
NO_PROCESSES_HINT = "stop what is not needed, or raise that limit"


def check_process_room(room: ProcessRoom | None) -> None:
    """Raise a `DaemonError` if the limits leave a daemon too few processes and threads."""
    if room is None or room.left >= PROCESSES_OF_DAEMON:
        return
    raise DaemonError(
        "no_processes",
        f"the daemon needs {PROCESSES_OF_DAEMON} more processes and threads, and {room.left} "
        f"are left: {room.sentence()}",
        NO_PROCESSES_HINT,
    )


def plan_for(limits: Limits, settings: Settings, expected: Mapping[str, int]) -> Plan:
    """Return the plan, by the bytes `expected` of each schedule; a `DaemonError`: too little."""
    try:
        return plan_workers(
            limits,
            max_long=settings.max_long_workers,
            max_short=settings.max_short_workers,
            worker_memory_bytes=settings.worker_memory_mb * MB,
            reserve_bytes=settings.reserve_mb * MB,
            daemon_bytes=DAEMON_BYTES,
            expected=expected,
        )
    except PlanError as exc:
        raise DaemonError("too_small", exc.message, exc.hint) from exc
