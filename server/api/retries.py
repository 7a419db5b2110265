# SPDX-License-Identifier: Apache-2.0
"""Deaths for memory after which a request was queued again (`--retry-oom`), as views show them.

The request itself goes on, and has no error; what its attempt died of is in the event log.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...requests_db.records import Event, Json, Request
from ...requests_db.sql import queries
from ...requests_db.states import RequestState
from ...system.hidden_values import hide_credentials
from .dependencies import Dependencies


async def retries(deps: Dependencies, requests: Sequence[Request]) -> dict[str, Json]:
    """The last such death of each of the requests that had one, by the request's id."""
    found = {}
    for request in requests:
        if may_have_run_before(request):
            events = await deps.store.read(queries.retries_of(request.id))
            if events:
                found[request.id] = retry_view(events[-1])
    return found


def may_have_run_before(request: Request) -> bool:
    """Whether it is worth asking: an attempt may have died for memory."""
    attempts = request.attempts + (request.state is RequestState.PENDING)
    return request.retry_oom and attempts > 1


def retry_view(event: Event) -> Json:
    """One of them: `{"at", "message", "memory_bytes", "error"}`, the memory of what came next."""
    names = ("message", "memory_bytes", "error")
    return {"at": event.at, **{name: hide_credentials(event.data.get(name)) for name in names}}
