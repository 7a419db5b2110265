# SPDX-License-Identifier: Apache-2.0
"""`Claimer`: claims as many pending requests as there is room for, and submits them.

    pending requests ──▶ room for how many workers? ──▶ memory for all of them? ─ yes ─▶ claim
                                                               │ no, or LONG                │
                                                               ▼                            ▼
                        shortages ◀── short ── policy.memory: which ones fit? ──▶ claim chosen
                                                                     executor.submit ◀──────┘

Where memory is short, the others stay in the queue, and `shortages` says what they wait for.

Owns, for each schedule, whether requests are pending (`has_pending`: set by any thread, cleared
before a claim, so that no insert is missed) and when to look at memory again; and the requests that
were cancelled between their claim and their submission. Any thread may call `note_pending` and
`cancel`, and read `shortages` and `is_short`; the rest belongs to the dispatcher's thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...environments.engines.registry import runs_elsewhere
from ...executor.errors import FrameError, NoRoom
from ...executor.messages import Raised, Succeeded, Task, TaskError
from ...executor.policy.memory import FreeMemory, Need, Shortage, admit
from ...requests_db.records import Claim, Request, label_of
from ...requests_db.sql import queries
from ...requests_db.sql.rows import arrival_of
from ...requests_db.transactions import dispatching
from ...schema.states import ErrorKind, Schedule
from ..operations.registry import OPERATIONS
from .memory_estimates import asked_bytes
from .outcomes import payload_of
from .recorder import Ended, Recorder
from .running import DispatchContext, log_fields

log = logging.getLogger(__name__)

MAX_CLAIM = 64  # requests; a larger burst is claimed in several statements
EXTRA_SHORTAGES = 64  # pending requests beyond the free workers whose shortage is shown, too
CLAIM_ORDER = (Schedule.SHORT, Schedule.LONG)  # a SHORT request never waits behind LONG ones


@dataclass(slots=True)
class _Queue:
    """The known facts about one schedule's queue."""

    has_pending: bool = True  # an earlier daemon may have left some
    short: dict[str, Shortage] = field(default_factory=dict)
    looked_at: float = -math.inf
    look_at: float | None = None  # when to look at memory again; None while it is not short


class Claimer:
    """Feeds the executor from the queue."""

    def __init__(self, context: DispatchContext, recorder: Recorder) -> None:
        self.shortages: dict[str, Shortage] = {}  # by request; replaced, never changed
        self._context = context
        self._executor = context.executor
        self._recorder = recorder
        self._estimates = context.estimates
        # pathlib would take a third of the time that a claimed request costs.
        self._before_id, self._after_id = str(context.paths.request_log("*")).rsplit("*", 1)
        self._queues = {schedule: _Queue() for schedule in CLAIM_ORDER}
        self._cancelled: set[str] = set()
        self._under_way = 0  # LONG requests that the daemon carried out at the last claim
        self._unreleased: list[str] = []  # claimed without room, and not yet requeued

    def note_pending(self, *schedules: Schedule) -> None:
        """Look at these schedules' queues at the next `claim` (any thread)."""
        for schedule in schedules:
            self._queues[schedule].has_pending = True

    def cancel(self, request_id: str) -> None:
        """Cancel a request that has been claimed, submitted or not (any thread)."""
        # First noted, then passed to the executor: until `_submit`, the executor does not know the
        # request, and `_submit` reads the note right afterwards.
        self._cancelled.add(request_id)
        tasks = self._context.tasks
        if self._executor.cancel(request_id) or (tasks and tasks.cancel(request_id)):
            self._cancelled.discard(request_id)

    def goes_on(self, event: Succeeded) -> bool:
        """Continue in the daemon what a worker has prepared, if the operation is of that kind."""
        request, tasks = self._context.running.get(event.task_id), self._context.tasks
        if request is None or tasks is None or not OPERATIONS[request.operation].in_daemon:
            return False
        tasks.begin(request, event.result, event.peak_bytes or 0)
        if request.id in self._cancelled:
            self.cancel(request.id)
        return True

    def is_short(self, schedule: Schedule) -> bool:
        """Return whether the head of this schedule's queue waits for memory (any thread)."""
        return bool(self._queues[schedule].short)

    def due_at(self) -> float:
        """Return when to look at memory again, on the monotonic clock."""
        times = (q.look_at for q in self._queues.values() if q.look_at is not None)
        return min(times, default=math.inf)

    def room(self, schedule: Schedule) -> int:
        """Return how many requests may begin beside those of the daemon's own (any thread)."""
        under_way = self._under_way if schedule is Schedule.LONG else 0
        return self._executor.room(schedule) - under_way

    def claim(self, ended: Ended) -> None:
        """Claim and submit the requests for which there is room; those that `ended` free some.

        Raises:
            DatabaseError: nothing was claimed by the statement that failed. Call `note_pending`.
        """
        self._free(ended)
        self._release()
        for schedule, queue in self._queues.items():
            if queue.look_at is not None:
                if time.monotonic() < queue.look_at:
                    continue
                queue.has_pending = True
            self._fill(schedule, queue)

    def _free(self, ended: Ended) -> None:
        self._cancelled.difference_update(ended.requests)
        for schedule in ended.requeued:
            self._queues[schedule].has_pending = True
        if ended.requests:  # some memory is free again
            for queue in self._queues.values():
                if queue.look_at is not None:
                    soon = queue.looked_at + self._context.timing.least_look_seconds
                    queue.look_at = min(queue.look_at, soon)

    def _fill(self, schedule: Schedule, queue: _Queue) -> None:
        while queue.has_pending and (room := self._room(schedule)) > 0:
            limit = min(room, MAX_CLAIM)
            queue.has_pending = False  # before the claim: an insert meanwhile sets it again
            # LONG requests differ too much to be estimated together, and are few.
            must_choose = schedule is Schedule.LONG or queue.look_at is not None
            if must_choose or not self._executor.free_memory(schedule).fits_all(
                limit, self._estimates.largest(schedule)
            ):
                claim = self._claim_what_fits(schedule, queue, limit)
            else:
                claim = self._context.store.write(dispatching.claim, schedule, limit, time.time())
                queue.has_pending |= len(claim.requests) == limit
            self._context.publish(claim.events)
            self._submit(queue, claim.requests)

    def _room(self, schedule: Schedule) -> int:
        self._under_way = len(self._in_daemon())
        return self.room(schedule)

    def _in_daemon(self) -> list[Request]:
        """Return the LONG requests that the daemon carries out; the others start nothing."""
        running, tasks = self._context.running, self._context.tasks
        return [] if tasks is None else [running[i] for i in running.long if i in tasks]

    def _claim_what_fits(self, schedule: Schedule, queue: _Queue, limit: int) -> Claim:
        """Claim the requests at the head of the queue for which there is enough memory."""
        now = self._context.clock.now()
        head = self._context.store.read(queries.first_pending(schedule, limit + EXTRA_SHORTAGES))
        needs = [Need(r.id, self._bytes_of(r), arrival_of(r)) for r in head]
        admission = admit(needs, self._free_memory(schedule), most=limit, now=now)
        self._note_shortages(queue, admission.short)
        chosen = set(admission.chosen)
        fitting = [request for request in head if request.id in chosen]
        claim = self._context.store.write(dispatching.claim_chosen, fitting, time.time())
        queue.has_pending |= not admission.short and bool(chosen)
        return claim

    def _free_memory(self, schedule: Schedule) -> FreeMemory:
        """Return the executor's free memory, less that of requests that the daemon carries out."""
        free = self._executor.free_memory(schedule)
        if not (under_way := self._in_daemon()):
            return free
        held = sum(map(self._bytes_of, under_way))
        burst, available = free.burst_bytes - held, free.available_bytes - held
        return replace(free, burst_bytes=burst, available_bytes=available, is_alone=False)

    def _bytes_of(self, request: Request) -> int:
        """Estimate the memory of a request: of its worker, and of replicas that it adds here."""
        spec, running, is_scale = request.payload, 0, request.operation == "scale"
        if is_scale:  # has no worker
            found = self._context.store.read(queries.environment(str(request.environment)))
            spec = {} if found is None else found.spec
            running = 0 if found is None else int(spec.get("replicas") or 1)
        if runs_elsewhere(spec.get("provider")):
            running = int(request.payload.get("replicas") or 1) - (not is_scale)
        return self._estimates.of(request, running)

    def _note_shortages(self, queue: _Queue, short: dict[str, Shortage]) -> None:
        """Note which requests wait, for `status`, and when to look again."""
        if not short and queue.look_at is None:
            return
        queue.looked_at = time.monotonic()
        queue.look_at = queue.looked_at + self._context.timing.look_seconds if short else None
        queue.short = short
        self.shortages = {i: s for each in self._queues.values() for i, s in each.short.items()}

    def _submit(self, queue: _Queue, requests: Sequence[Request]) -> None:
        for position, request in enumerate(requests):
            self._context.running[request.id] = request
            started = None
            try:
                task = self._task(request)
                if task.operation:
                    started = self._executor.submit(task)
                elif self._context.tasks is not None:
                    self._context.tasks.begin(request)
            except (KeyError, TypeError, FrameError) as exc:
                self._context.traces.claimed(request)
                log.exception("request %s cannot be run", request.id, extra=log_fields(request))
                error = self._why_not_run(request, exc)
                self._recorder.deliver(Raised(request.id, error, None, time.time()))
                continue
            except NoRoom:
                del self._context.running[request.id]
                self._context.traces.released(request.id)
                queue.has_pending = True
                self._unreleased += [r.id for r in requests[position:]]
                self._release()
                return
            self._context.traces.claimed(request)
            if started is not None:
                self._recorder.note_started(started)
            if request.id in self._cancelled:
                self.cancel(request.id)

    def _release(self) -> None:
        """Requeue the requests without room; after a failed write, the next `claim` retries."""
        if self._unreleased:
            released = self._context.store.write(dispatching.release, self._unreleased, time.time())
            self._context.publish(released)
            self._unreleased = []

    def _why_not_run(self, request: Request, exc: Exception) -> TaskError:
        if request.operation in self._context.operations:
            return TaskError(type(exc).__name__, f"it cannot be handed to a worker: {exc}")
        return TaskError(
            type(exc).__name__,
            f"this openenvd has no operation {request.operation!r}",
            "the client has another version: restart the daemon with that one, and submit again",
            ErrorKind.INVALID,
        )

    def _task(self, request: Request) -> Task:
        operation = self._context.operations[request.operation]
        return Task(
            id=request.id,
            operation=operation,
            payload=payload_of(request),
            schedule=request.schedule,
            log_path=f"{self._before_id}{request.id}{self._after_id}",
            label=label_of(request),
            timeout_seconds=request.timeout_seconds,
            memory_bytes=request.memory_bytes or asked_bytes(request),
            expected_bytes=self._bytes_of(request) if operation else 0,  # "": it has no worker
            traceparent=self._context.traces.begin(request),
        )
