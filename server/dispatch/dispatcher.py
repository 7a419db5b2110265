# SPDX-License-Identifier: Apache-2.0
"""The one thread that knows both the queue and the executor.

    API ──insert──▶ requests table                    BurstableExecutor
     └──submitted()──▶ wake ─┐                        ▲ submit     │ events (supervisor thread)
                             ▼                        │            ▼
                        ┌─ turn: record what happened ┴─ claim ◀─ deliver() ─ inbox
                        └─ publish the events written ──▶ bus ──▶ waiting clients

The queue *is* the table. A turn first writes what the executor reported (one transaction), then
claims as many pending requests as there is room for, in one statement per schedule, SHORT first.
Where memory is short, it looks at the head of the queue, has `executor.policy.admission` choose,
and claims what was chosen; the others stay in the queue, and `shortages` says what they wait for.
The thread sleeps until somebody wakes it: an insert, an executor event, `stop`, or the time of the
next look: at old requests, at long logs, at memory when somebody waits for it.

Which worker took a request is known at once, and written with the next thing that is
(`BEGUN_SECONDS` later at the latest).

Failure cases:

* The database cannot be written (disk full). What was reported stays in the inbox, in order, and
  is tried again every `RETRY_SECONDS`; nothing is claimed meanwhile, so nothing runs unrecorded.
* An outcome that cannot be written as it is (no JSON, say) fails its own request, and no other.
* The daemon dies between claim and submit, or before an outcome is written: the request is left
  RUNNING and the next daemon's recovery decides about it.
* A claimed request finds no room after all (a worker died in between): it is released, and its
  attempt not counted.
* A claimed request cannot be made a task of: another version of ours wrote it, whose operation is
  not known here. It fails, and no other.

Owned by this thread: the store, the requests that run. Shared: the inbox (a deque: append and
popleft are atomic), the `_pending` flags (set by anyone, cleared before a claim, so that no insert
is missed), `_wake`; and to look at: `estimates`, `shortages` and the counters.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ...executor import BurstableExecutor, NoRoom
from ...executor.errors import FrameError
from ...executor.messages import (
    Cancelled,
    Died,
    ExecutorEvent,
    Progressed,
    Raised,
    Started,
    Succeeded,
    Task,
    TaskError,
)
from ...executor.policy.admission import Need, Shortage, admit
from ...requests_db.dispatch_store import DispatchStore
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Event, Expectation, PeakSample, Request, Retry
from ...requests_db.results import Claim
from ...requests_db.states import ErrorKind, Schedule
from ...shim.log_rotation import keep_newest_half
from ..housekeeping.log_retention import logs_of, to_remove
from ..settings import Paths, Settings
from .memory_estimates import MemoryEstimates, asked_bytes, left_bytes
from .oom_policy import FailureContext, payload_of, reason_of, retry_of, what_happened
from .outcomes import FinalEvent, outcome_of

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
COLLECT_EVERY_SECONDS = 600.0
MAX_CLAIM = 64  # a burst larger than this is claimed in several statements
LOOK_BEYOND = 64  # so many of those that could not start anyway are told why
LOOK_SECONDS = 0.5  # between looks at memory while somebody waits for it: others free it, too
LEAST_LOOK_SECONDS = 0.01  # also when requests end
BOUND_LOGS_SECONDS = 2.0
# Which worker took a request is written with its outcome, or so long after it began: most SHORT
# requests have ended by then, and a transaction less is a third of what they cost.
BEGUN_SECONDS = 0.05
LEARNED_SECONDS = 1.0  # what peaks have taught is written so often, and when a worker has died
MB = 2**20
CLAIM_ORDER = (Schedule.SHORT, Schedule.LONG)  # a SHORT request never waits behind LONG ones
SECONDS_PER_DAY = 86_400


class Dispatcher:
    """Feeds the executor from the queue, and the queue from the executor."""

    def __init__(
        self,
        store: DispatchStore,
        executor: BurstableExecutor,
        *,
        publish: Callable[[Sequence[Event]], None],
        operations: dict[str, str],
        paths: Paths,
        settings: Settings,
        estimates: MemoryEstimates | None = None,
        budget_bytes: int = 2**62,
    ) -> None:
        """`operations` maps an operation's name to the dotted name that the worker imports."""
        self.estimates = estimates or MemoryEstimates()
        self.shortages: dict[str, Shortage] = {}  # by request; replaced, never changed
        self.kills: Counter[tuple[str, str]] = Counter()  # for memory: by operation and detector
        self.retries: Counter[str] = Counter()  # by operation
        self._budget_bytes = budget_bytes
        self._running: dict[str, Request] = {}
        self._long: set[str] = set()  # those of them that are LONG
        self._short: dict[Schedule, dict[str, Shortage]] = {}
        self._look_at: dict[Schedule, float] = {}  # when to look again at what waits for memory
        self._looked_at: dict[Schedule, float] = {}
        self._bound_logs_at = math.inf
        self._begun: list[ExecutorEvent] = []  # not yet written
        self._begun_at = math.inf  # when they are, at the latest
        self._unwritten: dict[tuple[str, str], Expectation] = {}  # learned, and not yet written
        self._learned_at = math.inf  # when it is, at the latest
        self._wrote_at = -math.inf
        self._store = store
        self._executor = executor
        self._publish = publish
        self._operations = operations
        self._paths = paths
        # pathlib would take a third of the time that a claimed request costs.
        self._before_id, self._after_id = str(paths.request_log("*")).rsplit("*", 1)
        self._settings = settings
        self._inbox: deque[ExecutorEvent] = deque()
        self._called_off: set[str] = set()
        self._pending = dict.fromkeys(CLAIM_ORDER, True)
        self._wake = threading.Event()
        self._stopping = False
        self._collect_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Begin to claim."""
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended; what still runs stays RUNNING for the next daemon."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def submitted(self, schedule: Schedule) -> None:
        """A request was inserted (any thread)."""
        self._pending[schedule] = True
        self._wake.set()

    def deliver(self, event: ExecutorEvent) -> None:
        """The executor reports something (its supervisor thread)."""
        self._inbox.append(event)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End a request that has been claimed, wherever it is by now (any thread)."""
        # Noted before it is looked for: between claim and submit the executor does not know it
        # yet, and `_submit` looks here right after.
        self._called_off.add(request_id)
        if self._executor.cancel(request_id):
            self._called_off.discard(request_id)

    def is_short(self, schedule: Schedule) -> bool:
        """Whether the head of this schedule's queue waits for memory (any thread)."""
        return bool(self._short.get(schedule))

    def _run(self) -> None:
        self._wake.set()  # what an earlier daemon left pending
        while self._await_work():
            try:
                self._turn()
            except DatabaseError as exc:
                log.error("the queue cannot be written, trying again: %s", exc)
                time.sleep(RETRY_SECONDS)
                self._wake.set()
        with contextlib.suppress(DatabaseError):
            self._store.record(learned=list(self._unwritten.values()))

    def _await_work(self) -> bool:
        deadlines = (self._collect_at, self._bound_logs_at, self._begun_at, self._learned_at)
        look_at = min([*deadlines, *self._look_at.values()])
        self._wake.wait(timeout=max(0.0, look_at - time.monotonic()))
        self._wake.clear()
        return not self._stopping

    def _turn(self) -> None:
        self._record()
        for schedule in CLAIM_ORDER:
            self._fill(schedule)
        self._bound_logs()
        self._collect()

    # Recording what happened.

    def _record(self) -> None:
        reported = list(self._inbox)
        if reported or time.monotonic() >= min(self._begun_at, self._learned_at):
            self._publish(self._write_all([*self._begun, *reported]))
            self._begun, self._begun_at = [], math.inf
        for _ in reported:
            self._inbox.popleft()  # only now: a failed write leaves them for the next turn

    def _write_all(self, batch: list[ExecutorEvent]) -> list[Event]:
        """Write the batch; one event that cannot be written costs itself and no other."""
        try:
            return self._write(batch)
        except DatabaseError:
            raise
        except Exception:
            log.exception("writing %d events one by one", len(batch))
        return [written for event in batch for written in self._write_one(event)]

    def _write_one(self, event: ExecutorEvent) -> list[Event]:
        try:
            return self._write([event])
        except DatabaseError:
            raise
        except Exception as exc:
            log.exception("%s cannot be written", type(event).__name__)
            if not isinstance(event, Succeeded | Raised | Died | Cancelled):
                return []
            error = TaskError(type(exc).__name__, f"its outcome cannot be written: {exc}")
            return self._write([Raised(event.task_id, error, None, event.at)])

    def _write(self, batch: list[ExecutorEvent]) -> list[Event]:
        started = [e for e in batch if isinstance(e, Started)]
        progressed = [e for e in batch if isinstance(e, Progressed)]
        finals = [e for e in batch if isinstance(e, Succeeded | Raised | Died | Cancelled)]
        deaths = {e.task_id: e for e in finals if isinstance(e, Died | Raised) and reason_of(e)}
        known = {i: k for i in deaths if (k := self._failure_context(i)) is not None}
        again = {i: r for i, k in known.items() if (r := retry_of(deaths[i], k)) is not None}
        learned = self.estimates.learned(self._samples(finals), time.time())
        to_write = self._to_write_down(learned, has_died=bool(deaths))
        for death in deaths.values():
            if (retry := again.get(death.task_id)) is not None:
                self._say_in_log(death, retry.message)
            elif isinstance(death, Died):
                self._say_in_log(death, what_happened(death))
        events = self._store.record(
            started=[(e.task_id, e.worker, e.pid, e.pid_started_at, e.at) for e in started],
            progress=[(e.task_id, e.data, e.at) for e in progressed],
            outcomes=[
                outcome_of(e, known.get(e.task_id)) for e in finals if e.task_id not in again
            ],
            retries=list(again.values()),
            learned=to_write,
        )
        # Only now: a failed write is tried again with the same batch.
        self.estimates.accept(learned)
        self._wrote_down(learned, to_write)
        self._count(deaths.values(), again)
        self._forget(finals, again)
        return events

    def _to_write_down(
        self, learned: Sequence[Expectation], *, has_died: bool
    ) -> list[Expectation]:
        """What peaks have taught; of quick requests not each on its own."""
        if has_died or time.monotonic() >= min(self._learned_at, self._wrote_at + LEARNED_SECONDS):
            return list((self._unwritten | _by_key(learned)).values())
        return []

    def _wrote_down(self, learned: Sequence[Expectation], written: Sequence[Expectation]) -> None:
        if written:
            self._unwritten, self._learned_at = {}, math.inf
            self._wrote_at = time.monotonic()
        elif learned:
            self._unwritten |= _by_key(learned)
            self._learned_at = self._wrote_at + LEARNED_SECONDS

    def _samples(self, finals: Sequence[FinalEvent]) -> Iterator[tuple[Request, PeakSample]]:
        for event in finals:
            request = self._running.get(event.task_id)
            if request is not None and (sample := sample_of(event)) is not None:
                yield request, sample

    def _failure_context(self, request_id: str) -> FailureContext | None:
        request = self._running.get(request_id)
        if request is None:
            return None
        return FailureContext(
            request,
            label_of(request),
            self.estimates.peaks_of(request),
            len(self._long),
            self._budget_bytes,
        )

    def _say_in_log(self, death: Died | Raised, text: str) -> None:
        """The request's log ends with how its worker did."""
        path = self._paths.request_log(death.task_id)
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log_file:
            log_file.write(f"openenvd: {text}\n")

    def _count(self, deaths: Iterable[Died | Raised], again: Mapping[str, Retry]) -> None:
        for death in deaths:
            request, reason = self._running.get(death.task_id), reason_of(death)
            if request is not None and reason is not None and reason.is_oom:
                self.kills[request.operation, str(reason.detector or "unknown")] += 1
                self.retries[request.operation] += death.task_id in again

    def _forget(self, finals: Sequence[FinalEvent], again: Mapping[str, Retry]) -> None:
        self._called_off.difference_update(event.task_id for event in finals)
        for event in finals:
            request = self._running.pop(event.task_id, None)
            self._long.discard(event.task_id)
            if request is not None and event.task_id in again:
                self._pending[request.schedule] = True
        if finals:  # some memory is free again
            for schedule in self._look_at:
                soon = self._looked_at[schedule] + LEAST_LOOK_SECONDS
                self._look_at[schedule] = min(self._look_at[schedule], soon)

    # Claiming what may run.

    def _fill(self, schedule: Schedule) -> None:
        if schedule in self._look_at:
            if time.monotonic() < self._look_at[schedule]:
                return
            self._pending[schedule] = True
        while self._pending[schedule] and (room := self._executor.room(schedule)) > 0:
            limit = min(room, MAX_CLAIM)
            self._pending[schedule] = False  # before the claim: an insert meanwhile sets it again
            if self._is_short(schedule, limit):
                claim = self._claim_what_fits(schedule, limit)
            else:
                self._wait_for_memory(schedule, {})
                claim = self._store.claim(schedule, limit, time.time())
                self._pending[schedule] |= len(claim.requests) == limit
            self._publish(claim.events)
            self._submit(schedule, claim.requests)

    def _is_short(self, schedule: Schedule, limit: int) -> bool:
        """Whether each must be looked at before it is claimed."""
        if schedule is Schedule.LONG or schedule in self._look_at:
            return True  # LONG ones differ too much to be guessed at, and are few
        largest = self.estimates.largest(schedule)
        return self._executor.is_short(schedule, limit, largest)

    def _claim_what_fits(self, schedule: Schedule, limit: int) -> Claim:
        """Look at the head of the queue, and claim of it what memory suffices for."""
        now = time.time()
        head = self._store.first_pending(schedule, limit + LOOK_BEYOND)
        needs = [Need(r.id, self.estimates.of(r), r.created_at) for r in head]
        admission = admit(needs, self._executor.free_memory(schedule), most=limit, now=now)
        self._wait_for_memory(schedule, admission.short)
        chosen = set(admission.chosen)
        claim = self._store.claim_chosen([r for r in head if r.id in chosen], now)
        self._pending[schedule] |= not admission.short and bool(chosen)
        return claim

    def _wait_for_memory(self, schedule: Schedule, short: dict[str, Shortage]) -> None:
        """Remember who waits, for `status`, and when to look again."""
        if short:
            self._looked_at[schedule] = time.monotonic()
            self._look_at[schedule] = self._looked_at[schedule] + LOOK_SECONDS
        elif schedule not in self._look_at:
            return
        else:
            del self._look_at[schedule]
        self._short[schedule] = short
        self.shortages = {i: s for each in self._short.values() for i, s in each.items()}

    def _submit(self, schedule: Schedule, requests: Sequence[Request]) -> None:
        for position, request in enumerate(requests):
            self._running[request.id] = request
            if schedule is Schedule.LONG:
                self._long.add(request.id)
            try:
                started = self._executor.submit(self._task(request))
            except (KeyError, TypeError, FrameError) as exc:
                log.exception("request %s cannot be run", request.id)
                self.deliver(Raised(request.id, self._why_not_run(request, exc), None, time.time()))
                continue
            except NoRoom:
                del self._running[request.id]
                self._long.discard(request.id)
                self._publish(self._store.release([r.id for r in requests[position:]], time.time()))
                self._pending[schedule] = True
                return
            if started is not None:
                self._begun.append(started)
                self._begun_at = min(self._begun_at, time.monotonic() + BEGUN_SECONDS)
            if request.id in self._called_off:
                self.cancel(request.id)

    def _why_not_run(self, request: Request, exc: Exception) -> TaskError:
        if request.operation in self._operations:
            return TaskError(type(exc).__name__, f"it cannot be handed to a worker: {exc}")
        return TaskError(
            type(exc).__name__,
            f"this openenvd has no operation {request.operation!r}",
            "another version was asked for it: restart the daemon with that one, and ask again",
            ErrorKind.INVALID,
        )

    def _task(self, request: Request) -> Task:
        return Task(
            id=request.id,
            operation=self._operations[request.operation],
            payload=payload_of(request),
            schedule=request.schedule,
            log_path=f"{self._before_id}{request.id}{self._after_id}",
            label=label_of(request),
            timeout_seconds=request.timeout_seconds,
            memory_bytes=request.memory_bytes or asked_bytes(request),
            expected_bytes=self.estimates.of(request),
        )

    # Keeping logs bounded.

    def _bound_logs(self) -> None:
        """Cut the logs that have grown too long; of LONG requests only, others end too soon."""
        if not self._long:
            self._bound_logs_at = math.inf
            return
        now = time.monotonic()
        if self._bound_logs_at == math.inf:
            self._bound_logs_at = now + BOUND_LOGS_SECONDS
        if now < self._bound_logs_at:
            return
        self._bound_logs_at = now + BOUND_LOGS_SECONDS
        for request_id in self._long:
            self._bound_log(request_id)

    def _bound_log(self, request_id: str) -> None:
        path, limit = self._paths.request_log(request_id), self._settings.max_log_mb * MB
        with contextlib.suppress(OSError):
            if path.stat().st_size > limit:
                keep_newest_half(str(path), limit)

    # Collecting what is old.

    def _collect(self) -> None:
        if time.monotonic() < self._collect_at:
            return
        self._collect_at = time.monotonic() + COLLECT_EVERY_SECONDS
        keep_seconds = self._settings.keep_days * SECONDS_PER_DAY
        removed = self._store.collect(time.time(), self._settings.keep_requests, keep_seconds)
        _remove(self._paths.request_log(request_id) for request_id in removed)
        for name in self._store.collect_environments(time.time(), keep_seconds):
            shutil.rmtree(self._paths.environment_logs / name, ignore_errors=True)
        self._collect_logs(time.time() - keep_seconds)

    def _collect_logs(self, oldest: float) -> None:
        logs = list(logs_of(self._paths))  # first: what begins from now on is not among them
        with contextlib.suppress(OSError):
            replicas = {path.name for path in self._paths.runs.iterdir()}
            most_bytes = self._settings.max_logs_mb * MB
            running = self._running.keys() | replicas
            _remove(to_remove(logs, running, oldest=oldest, most_bytes=most_bytes))


def _remove(files: Iterable[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):  # it has gone, or has to stay
            path.unlink()


def sample_of(event: FinalEvent) -> PeakSample | None:
    """What a request's end teaches of its memory. One that raised may have done so at once, and
    teaches nothing.
    """
    if isinstance(event, Succeeded) and event.peak_bytes is not None:
        return PeakSample(event.at, event.peak_bytes + left_bytes(event.result))
    reason = reason_of(event)
    if reason is None or not reason.is_oom:
        return None
    known = [size for size in (reason.peak_bytes, reason.limit_bytes) if size is not None]
    return PeakSample(event.at, max(known), killed=True) if known else None


def _by_key(learned: Iterable[Expectation]) -> dict[tuple[str, str], Expectation]:
    return {(each.operation, each.source): each for each in learned}


def label_of(request: Request) -> str:
    """For people: `launch trial`."""
    return f"{request.operation} {request.environment or ''}".rstrip()
