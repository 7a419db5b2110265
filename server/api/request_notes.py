# SPDX-License-Identifier: Apache-2.0
"""Facts for views of requests that no row has: why a request waits, what attempts died of.

memory is short for it                    waiting for memory: needs 210 MB, 95 MB free
memory is short for an update             …; an update needs memory for both generations at once
there is room for it and all before it    about to start
others are before it                      queued behind 70 requests
no other is before it                     waiting for a free worker

A request that was killed for memory and queued again (`--retry-oom`) continues, and has no error;
what its attempt died of is in the event log.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from .dependencies import Dependencies
from .views import request_view

MAX_COUNTED = 10_000
_SHOWN_OF_DEATH = ("message", "memory_bytes", "error")


async def request_views(deps: Dependencies, requests: Sequence[Request]) -> list[Json]:
    """Return the views of requests, with why they wait and what their attempts died of."""
    why, again = await _reasons(deps, requests), await _retries(deps, requests)
    return [request_view(each, why.get(each.id), again.get(each.id)) for each in requests]


async def _reasons(deps: Dependencies, requests: Sequence[Request]) -> dict[str, str]:
    """Return why each pending one among the requests waits, by its id."""
    pending = [request for request in requests if request.state is RequestState.PENDING]
    schedules = {request.schedule for request in pending}
    queues = {s: await deps.store.read(queries.places(s, MAX_COUNTED)) for s in schedules}
    found = {}
    for request in pending:
        places, room = queues[request.schedule], deps.executor.room(request.schedule)
        found[request.id] = "about to start"  # also where it was claimed meanwhile
        if len(places) >= MAX_COUNTED or request.seq in places:
            ahead = places.get(request.seq, MAX_COUNTED + 1)
            found[request.id] = reason_at(deps, request, ahead, room)
    return found


def reason_when_new(deps: Dependencies, request: Request) -> str | None:
    """Return why a request that was just written waits, without asking how many are before it."""
    if request.state is not RequestState.PENDING:
        return None
    has_room = deps.executor.room(request.schedule) > 0
    return reason_of(None, room=int(has_room), is_short=False)


def reason_of(ahead: int | None, *, room: int, is_short: bool) -> str:
    """Return why a request waits, by the number of those `ahead` (None: that is not known).

    `room` is how many workers could start now, `is_short` whether the head of the queue waits for
    memory.
    """
    if (ahead or 0) < room and not is_short:
        return "about to start"
    if not ahead:
        return "waiting for a free worker"
    many = f"more than {MAX_COUNTED}" if ahead > MAX_COUNTED else f"{ahead}"
    noun = "request" if ahead == 1 else "requests"
    if not is_short:
        return f"queued behind {many} {noun}"
    return f"queued behind {many} {noun}, the first of which waits for memory"


def reason_of_shortage(sentence: str, *, is_update: bool) -> str:
    """Return why a request waits for memory; `sentence` has the sizes."""
    both = "; an update needs memory for both generations at once"
    return sentence + both if is_update else sentence


def reason_at(deps: Dependencies, request: Request, ahead: int, room: int) -> str:
    """Return why a request waits, by how many are before it; `room` is as of `reason_of`."""
    claimer = deps.dispatcher.claimer
    if shortage := claimer.shortages.get(request.id):
        is_update = request.payload.get("replaces") is not None
        return reason_of_shortage(shortage.sentence(), is_update=is_update)
    is_short = claimer.is_short(request.schedule)
    return reason_of(ahead, room=room, is_short=is_short)


async def _retries(deps: Dependencies, requests: Sequence[Request]) -> dict[str, Json]:
    """Return the last death for memory of each request that had one, by the request's id.

    `memory_bytes` is the memory of the attempt after it.
    """
    found = {}
    for request in filter(may_have_run_before, requests):
        if events := await deps.store.read(queries.retries_of(request.id)):
            last = events[-1]
            shown = {name: hide_credentials(last.data.get(name)) for name in _SHOWN_OF_DEATH}
            found[request.id] = {"at": last.at, **shown}
    return found


def may_have_run_before(request: Request) -> bool:
    """Return whether an attempt may have died for memory, which its events then tell."""
    attempts = request.attempts + (request.state is RequestState.PENDING)
    return request.retry_oom and attempts > 1
