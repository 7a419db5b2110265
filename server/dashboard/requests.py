# SPDX-License-Identifier: Apache-2.0
"""The queue, what runs and what ended lately, and the faults of these.

Only the head of each schedule's queue is shown, so that ten thousand waiting requests cost no more
than ten. A request is rendered again only when it has changed.

Kind `rollouts` has the rollouts that run or ended lately, each with its last report.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...requests_db.records import RETRYING, Event, Request
from ...requests_db.sql import queries
from ...requests_db.transactions.journal import REQUEST_PROGRESS, REQUEST_STATE
from ...schema.states import FINAL_STATES, ErrorKind, RequestState, Schedule
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ..api.dependencies import Dependencies
from ..api.routes_daemon import FAILED_LAUNCHES_SHOWN, worth_showing
from ..api.routes_requests import may_have_run_before, reason_at
from ..api.routes_rollouts import mark_of
from ..api.streams import last_report
from ..api.views import error_view, short_request_view
from . import environments
from .live_state import LiveState, Turn

MAX_WAITING = 10  # of each schedule
MAX_RUNNING = 200
LOOKED_AT = 60  # ended requests, of which some are shown
MAX_FAILED = 100  # among which faults are looked for
REASON_TICKS = 3  # between two looks at why requests wait, when none has changed

_PROGRESS = ("message", "done", "total", "eta_seconds", "at_most_seconds")


class RequestSource:
    """Kind `requests`, and the faults of requests."""

    def __init__(self, deps: Dependencies, faults: environments.Faults) -> None:
        self._deps = deps
        self._faults = faults
        self._attempts: dict[str, Json] = {}  # died, and were followed by another attempt
        self._views: dict[str, tuple[Request, Json]] = {}  # as they were rendered last
        self._progress: dict[str, Json] = {}  # the last report of each running LONG request
        self._ticks = 0

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Read the requests when they have changed, and why they wait, every few seconds."""
        self._put_progress(state, turn.events)
        has_changed = turn.has(REQUEST_STATE)
        self._ticks = 0 if has_changed else self._ticks + turn.is_tick
        if has_changed or self._ticks >= REASON_TICKS:
            self._ticks = 0
            await self._put_requests(state, turn.now)
        if turn.is_first or any(e.data.get("state") in FINAL_STATES for e in turn.events):
            await self._put_failed(state)
        again = {e.request_id for e in turn.events if e.data.get("phase") == RETRYING}
        if turn.is_first:
            again |= {known.id for known, _ in self._views.values() if may_have_run_before(known)}
        for request_id in again:
            await self._put_retries(state, request_id)

    async def _put_requests(self, state: LiveState, now: float) -> None:
        read = self._deps.store.read
        shown: dict[str, Json] = {}
        late: list[Json] = []
        for schedule in Schedule:
            room = self._deps.dispatcher.claimer.room(schedule)
            waiting = await read(queries.first_pending(schedule, MAX_WAITING))
            for place, request in enumerate(waiting):
                reason = reason_at(self._deps, request, place, room)
                shown[request.id] = self._view(request) | {"place": place, "pending_reason": reason}
                if place == 0 and request.created_at < now - environments.WAITING_SECONDS:
                    late.append(environments.waiting_request(request, reason))
        self._faults.put(state, "queue", late)
        running = await read(queries.list_requests([RequestState.RUNNING], limit=MAX_RUNNING))
        await self._read_progress(running)
        latest = await read(queries.list_requests(states=FINAL_STATES, limit=LOOKED_AT))
        failed = await read(queries.never_launched(FAILED_LAUNCHES_SHOWN))
        for request in worth_showing(latest, failed):
            shown[request.id] = self._view(request)
        for request in running:
            progress = self._progress.get(request.id) or None
            shown[request.id] = self._view(request) | {"progress": progress}
        self._views = {key: view for key, view in self._views.items() if key in shown}
        state.replace("requests", shown)

    def _put_progress(self, state: LiveState, events: Iterable[Event]) -> None:
        for event in events:
            if (progress := _progress_of(event)) is not None and event.request_id is not None:
                self._progress[event.request_id] = progress
                known = self._views.get(event.request_id)
                if known is not None and known[0].state is RequestState.RUNNING:
                    state.put("requests", event.request_id, known[1] | {"progress": progress})

    async def _read_progress(self, running: Iterable[Request]) -> None:
        """Find what was reported before a page was open; drop that of requests that have ended."""
        known, self._progress = self._progress, {}
        for request in running:
            if request.id in known:
                self._progress[request.id] = known[request.id]
            elif request.schedule is Schedule.LONG:
                last = await last_report(self._deps.store, request.id, "message")
                self._progress[request.id] = (last and _progress_of(last)) or {}

    def _view(self, request: Request) -> Json:
        known = self._views.get(request.id)
        if known is not None and known[0] == request:
            return known[1]
        view = short_request_view(request)
        self._views[request.id] = request, view
        return view

    async def _put_retries(self, state: LiveState, request_id: str | None) -> None:
        """Find the deaths of attempts that were followed by another."""
        request = await self._deps.store.read(queries.request(request_id or ""))
        if request is not None:
            for event in await self._deps.store.read(queries.retries_of(request.id)):
                death = environments.death_of_attempt(request, event)
                self._attempts[death["id"]] = death
            self._faults.put(state, "attempts", list(self._attempts.values()))

    async def _put_failed(self, state: LiveState) -> None:
        read = self._deps.store.read
        failed = await read(queries.list_requests([RequestState.FAILED], limit=MAX_FAILED))
        succeeded = [RequestState.SUCCEEDED]
        launches = await read(queries.list_requests(succeeded, "launch", limit=MAX_FAILED))
        # The last launch of each name with success: a failure before it is over.
        ready = {launch.environment: launch.seq for launch in reversed(launches)}
        faults = [
            environments.fault_of_request(request)
            for request in failed
            if request.error is not None
            and (request.schedule is Schedule.LONG or request.error.kind is ErrorKind.OOM_KILLED)
            and request.error.kind is not ErrorKind.INVALID  # the caller was answered at once
            and (request.operation != "launch" or request.seq > ready.get(request.environment, 0))
        ]
        self._faults.put(state, "failed", faults)


def _progress_of(event: Event) -> Json | None:
    if event.kind != REQUEST_PROGRESS or not event.data.get("message"):
        return None
    return {name: event.data.get(name) for name in _PROGRESS}


KIND = "rollouts"
MAX_ROLLOUTS = 50
_TIMES = ("created_at", "started_at", "finished_at")


class RolloutSource:
    """Reads the requests when one of a rollout changes; reports come with their events."""

    def __init__(self, deps: Dependencies) -> None:
        self._deps = deps
        self._requests: dict[str, Request] = {}
        self._reports: dict[str, Json] = {}

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Put the rollouts that changed, or made progress."""
        for event in turn.events:
            if event.request_id is not None and "rollout" in event.data:
                self._reports[event.request_id] = mark_of(event.at, event.data["rollout"])
        if turn.is_first:
            self._reports.clear()  # events of newer ones may have been dropped
        if turn.is_first or any(
            event.request is None or event.request.operation == "rollout"
            for event in turn.events
            if event.kind == REQUEST_STATE
        ):
            await self._list()
        state.replace(KIND, {r.id: self._view(r) for r in self._requests.values()})

    async def _list(self) -> None:
        query = queries.list_requests(operation="rollout", limit=MAX_ROLLOUTS)
        found = await self._deps.store.read(query)
        self._requests = {request.id: request for request in found}
        self._reports = {i: r for i, r in self._reports.items() if i in self._requests}
        for request in found:  # one that was cancelled or killed has reports, but no result
            if not request.result and request.id not in self._reports:
                event = await last_report(self._deps.store, request.id, "rollout")
                mark = {} if event is None else mark_of(event.at, event.data["rollout"])
                self._reports[request.id] = mark

    def _view(self, request: Request) -> Json:
        payload = request.payload
        if request.finished_at and request.result:
            report = mark_of(request.finished_at, request.result)
        else:
            report = self._reports.get(request.id) or {}
        return {
            "id": request.id,
            "state": request.state,
            "environments": hide_credentials([payload["name"], *payload.get("more_names", [])]),
            "policy": hide_credentials(payload.get("policy")),
            "out": payload["out"],
            "episodes": payload.get("episodes"),
            **{name: getattr(request, name) for name in _TIMES},
            "error": error_view(request.error, request.payload),
            "report": report,
        }
