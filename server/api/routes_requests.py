# SPDX-License-Identifier: Apache-2.0
"""`/v1/requests`: submit, list, look at, wait for, follow and cancel requests; and `/v1/events`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ..dispatch.submission import CHANGING, Submission
from ..operations import registry
from .dependencies import Dependencies, Injected
from .request_notes import reason_when_new, reasons, retries
from .schemas import Retry, Submit, submit_union
from .streams import (
    Position,
    RequestStream,
    everything_stream,
    request_ends,
    text_stream,
    until_settled,
    wait_until_final,
)
from .views import request_view

MAX_WAIT_SECONDS = 60.0
MAX_LIST = 1000

router = APIRouter()

if TYPE_CHECKING:
    SubmitBody = Submit
else:
    SubmitBody = submit_union(registry.OPERATIONS)
LastEventId = Annotated[str | None, Header(description="Continue a stream where it was.")]
TAIL = Query(ge=0, description="Start with this many lines from the end.")


async def _found(request_id: str, deps: Injected) -> Request:
    """Find a request before its stream begins, which could not refuse the call any more."""
    return await deps.submitter.find(request_id)


Found = Annotated[Request, Depends(_found)]


@router.post("/requests", status_code=202)
async def submit(body: Annotated[SubmitBody, Body()], deps: Injected) -> Json:
    """Queue an operation; it is in the database when this answers."""
    submission = _submission(body)
    if submission.operation.name in CHANGING:
        await until_settled(deps, submission.payload["name"])
    request = await deps.submitter.submit(submission)
    view = request_view(request, reason_when_new(deps, request))
    return {"request_id": request.id, "request": view}


@router.get("/requests")
async def list_requests(
    deps: Injected,
    state: Annotated[list[RequestState] | None, Query()] = None,
    operation: str | None = None,
    environment: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 100,
) -> Json:
    """Show the queue and its history, newest first."""
    query = queries.list_requests(state, operation, environment, limit)
    found = await deps.store.read(query)
    why = await reasons(deps, found)
    again = await retries(deps, found)
    return {"requests": [request_view(r, why.get(r.id), again.get(r.id)) for r in found]}


@router.get("/requests/{request_id}")
async def get_request(
    request_id: str,
    deps: Injected,
    wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0,
) -> Json:
    """One request; with `wait_seconds`, as soon as it is final or the time is up."""
    if wait_seconds:
        request = await wait_until_final(deps, request_id.lower(), wait_seconds)
    else:
        request = await deps.submitter.find(request_id)
    return {"request": await _view(deps, request)}


@router.post("/requests/{request_id}/cancel")
async def cancel(request_id: str, deps: Injected) -> Json:
    """Cancel at once; a running request is `cancelling` until it is final."""
    done = await deps.submitter.cancel(request_id)
    view = await _view(deps, done.request)
    return {"request": view, "cancelled": done.is_done, "cancelling": done.is_under_way}


@router.post("/requests/{request_id}/retry", status_code=202)
async def retry(request_id: str, deps: Injected, body: Retry | None = None) -> Json:
    """Submit the same again: its payload, which no answer shows whole, and its options."""
    limits = {} if body is None else body.model_dump(exclude_none=True)
    first = await deps.submitter.find(request_id)
    if first.environment is not None:  # what became of it is seen a moment later
        await deps.reconciler.queue.wait(first.environment)
        await until_settled(deps, first.environment)
    request = await deps.submitter.retry(first.id, limits)
    return {"request_id": request.id, "request": request_view(request)}


@router.get("/requests/{request_id}/events", response_class=EventSourceResponse)
async def events(
    request: Found, deps: Injected, logs: bool = True, last_event_id: LastEventId = None
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of one request: `state`, `progress` and `log`, until it is final."""
    stream = RequestStream(deps, request, Position.parse(last_event_id), logs=logs)
    async for item in stream.items():
        yield item


@router.get("/requests/{request_id}/logs")
async def request_logs(
    request_id: str,
    deps: Injected,
    tail: Annotated[int | None, TAIL] = None,
    follow: bool = False,
) -> StreamingResponse:
    """What the request printed, as text; with `follow`, until it is final."""
    request = await deps.submitter.find(request_id)
    path = deps.paths.request_log(request.id)
    until = request_ends(deps, request) if follow else None
    return StreamingResponse(text_stream(deps, path, tail=tail, until=until), media_type=TEXT)


@router.get("/events", response_class=EventSourceResponse)
async def all_events(
    deps: Injected, last_event_id: LastEventId = None
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of everything that changes: `change`."""
    async for item in everything_stream(deps, Position.parse(last_event_id)):
        yield item


TEXT = "text/plain; charset=utf-8"


def _submission(body: Submit) -> Submission:
    fields: Any = body  # a model of `schemas.submit_model`
    return Submission(
        operation=registry.by_name(fields.operation),
        payload=fields.payload.model_dump(mode="json"),
        idempotency_key=body.idempotency_key,
        priority=body.priority,
        timeout_seconds=body.timeout_seconds,
        retry_oom=body.retry_oom,
    )


async def _view(deps: Dependencies, request: Request) -> Json:
    why, again = await reasons(deps, [request]), await retries(deps, [request])
    return request_view(request, why.get(request.id), again.get(request.id))
