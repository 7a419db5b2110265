# SPDX-License-Identifier: Apache-2.0
"""`/v1/requests`: submit, list, look at, wait for, follow and cancel requests; and `/v1/events`.

The body of `POST /v1/requests` is a discriminated union: there is one model per operation, made
from its `Payload`, so that OpenAPI shows every operation with its fields, and a wrong body is
refused with the field's name before anything is written.

A view says why a request waits, and what its attempts died of, which no row has:

    memory is short for it                    waiting for memory: needs 210 MB, 95 MB free
    memory is short for an update             …; an update needs memory for both generations at once
    there is room for it and all before it    about to start
    others are before it                      queued behind 70 requests
    no other is before it                     waiting for a free worker
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field, create_model

from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.operation_options import MEMORY_LIMITS, RequestOptions
from ...schema.spec import LaunchOptions
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ...system.text.units import near_matches, plural
from ..dispatch.submission import request_of
from ..errors import Invalid
from ..operations import registry
from ..operations.base import Operation, Payload, fields_of
from . import streams
from .dependencies import Dependencies, Injected
from .views import request_view

_SEE = "GET /openapi.json shows every operation"


_OPTIONS = fields_of(RequestOptions)  # what every request carries beside its payload


_LIMITS = fields_of(LaunchOptions, only=MEMORY_LIMITS)


class Retry(create_model("Limits", __base__=Payload, **_LIMITS)):  # type: ignore[misc]
    """The memory limits with which a request is submitted again, if its payload has them."""


def submit_model(operation: type[Operation]) -> type[BaseModel]:
    """`LaunchRequest` for `launch`: its payload model under the literal name of the operation."""
    fields: dict[str, Any] = {
        "operation": (Literal[operation.name], Field(description=operation.summary)),
        "payload": (operation.Payload, ...),
        **_OPTIONS,
    }
    name, config = f"{operation.name.title()}Request", ConfigDict(extra="forbid")
    return create_model(name, __config__=config, __doc__=operation.summary, **fields)


def invalid_of(error: Mapping[str, Any]) -> Invalid:
    """Turn pydantic's first error into a refusal that names the caller's field."""
    context = error.get("ctx") or {}
    match error["type"]:
        case "json_invalid":
            return Invalid(f"the body is not JSON: {context.get('error', error['msg'])}", _SEE)
        case "union_tag_not_found":
            return Invalid("operation: is missing", _SEE, field="operation")
        case "union_tag_invalid":
            name = str(context.get("tag"))
            hint = f"there are {', '.join(registry.OPERATIONS)}"
            near, hint = near_matches(name, list(registry.OPERATIONS), hint)
            return Invalid(f"there is no operation {name!r}", hint, field="operation", near=near)
        case "extra_forbidden" if (unknown := _unknown_field(error["loc"])) is not None:
            return unknown
    # The location of a field starts with `body` and the operation's name.
    where, *path = [str(part) for part in error["loc"]] or [""]
    if where == "body":
        path = [part for part in path[1:] if part != "payload"]
    field = ".".join(path)
    why = str(error["msg"]).removeprefix("Value error, ")
    return Invalid(f"{field}: {why}" if field else f"body: {why}", _SEE, field=field)


def _unknown_field(location: Sequence[int | str]) -> Invalid | None:
    """Suggest similar fields of the operation's payload; None: it is no field of a payload."""
    match [str(part) for part in location]:
        case [_, operation, "payload", field]:
            fields = list(registry.OPERATIONS[operation].Payload.model_fields)
        case _:
            return None
    near, hint = near_matches(field, fields, _SEE)
    return Invalid(f"{operation} has no option {field!r}", hint, field=field, near=near)


MAX_WAIT_SECONDS = 60.0
MAX_LIST = 1000
MAX_COUNTED = 10_000  # of the requests before another one
_SHOWN_OF_DEATH = ("message", "memory_bytes", "error")

router = APIRouter()

if TYPE_CHECKING:
    SubmitBody = BaseModel
else:
    SubmitBody = Annotated[
        reduce(or_, map(submit_model, registry.OPERATIONS.values())),
        Field(discriminator="operation"),
    ]
LastEventId = Annotated[str | None, Header(description="Continue a stream where it was.")]


async def _found(request_id: str, deps: Injected) -> Request:
    """Find a request before its stream begins, which could not refuse the call any more."""
    return await deps.submitter.find(request_id)


Found = Annotated[Request, Depends(_found)]


@router.post("/requests", status_code=202)
async def submit(body: Annotated[SubmitBody, Body()], deps: Injected) -> Json:
    """Queue an operation; it is in the database when this answers."""
    fields: Any = body  # a model of `submit_model`
    options = body.model_dump(include=set(_OPTIONS))
    payload = fields.payload.model_dump(mode="json")
    new = request_of(registry.OPERATIONS[fields.operation], payload, **options)
    request = await deps.submitter.submit(new)
    # How many are before it is not counted.
    room = deps.dispatcher.claimer.room(request.schedule)
    view = request_view(request, reason_of(0, room=room, is_short=False))
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
    return {"requests": await request_views(deps, await deps.store.read(query))}


@router.get("/requests/{request_id}")
async def get_request(
    request_id: str,
    deps: Injected,
    wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0,
) -> Json:
    """One request; with `wait_seconds`, as soon as it is final or the time is up."""
    request = await streams.wait_until_final(deps, request_id.lower(), wait_seconds)
    [view] = await request_views(deps, [request])
    return {"request": view}


@router.post("/requests/{request_id}/cancel")
async def cancel(request_id: str, deps: Injected) -> Json:
    """Cancel at once; a running request is `cancelling` until it is final."""
    done = await deps.submitter.cancel(request_id)
    [view] = await request_views(deps, [done.request])
    is_done = done.before is RequestState.PENDING
    return {"request": view, "cancelled": is_done, "cancelling": done.is_under_way}


@router.post("/requests/{request_id}/retry", status_code=202)
async def retry(first: Found, deps: Injected, body: Retry | None = None) -> Json:
    """Submit the same again: its payload, which no answer shows whole, and its options."""
    limits = {} if body is None else body.model_dump(exclude_none=True)
    if first.environment is not None:  # what became of it is seen a moment later
        await deps.reconciler.queue.wait(first.environment)
    request = await deps.submitter.retry(first.id, limits)
    return {"request_id": request.id, "request": request_view(request)}


@router.get("/requests/{request_id}/events", response_class=EventSourceResponse)
async def events(
    request: Found, deps: Injected, logs: bool = True, last_event_id: LastEventId = None
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of one request: `state`, `progress` and `log`, until it is final."""
    stream = streams.RequestStream(deps, request, streams.Position.parse(last_event_id), logs=logs)
    async for item in stream.items():
        yield item


@router.get("/requests/{request_id}/logs")
async def request_logs(
    request: Found,
    deps: Injected,
    tail: Annotated[int | None, streams.TAIL] = None,
    since_seconds: Annotated[float | None, streams.SINCE] = None,
    follow: bool = False,
) -> StreamingResponse:
    """Return what the request printed, as text; with `follow`, until it is final."""
    path = deps.paths.request_log(request.id)
    until = streams.request_ends(deps, request) if follow else None
    text = streams.text_stream(deps, path, tail=tail, since=since_seconds, until=until)
    return StreamingResponse(text, media_type=streams.TEXT)


@router.get("/events", response_class=EventSourceResponse)
async def all_events(
    deps: Injected, last_event_id: LastEventId = None
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of everything that changes: `change`."""
    async for item in streams.everything_stream(deps, streams.Position.parse(last_event_id)):
        yield item


async def request_views(deps: Dependencies, requests: Sequence[Request]) -> list[Json]:
    """Return the views of requests, each with its pending reason and its last failed attempt."""
    why, again = await _reasons(deps, requests), await _retries(deps, requests)
    return [request_view(each, why.get(each.id), again.get(each.id)) for each in requests]


async def _reasons(deps: Dependencies, requests: Sequence[Request]) -> dict[str, str]:
    """Return why each pending one among the requests waits, by its id."""
    pending = [request for request in requests if request.state is RequestState.PENDING]
    schedules = {request.schedule for request in pending}
    queues = {s: await deps.store.read(queries.places(s, MAX_COUNTED)) for s in schedules}
    found = {}
    for request in pending:
        places, room = queues[request.schedule], deps.dispatcher.claimer.room(request.schedule)
        found[request.id] = "about to start"  # also where it was claimed meanwhile
        if len(places) >= MAX_COUNTED or request.seq in places:
            ahead = places.get(request.seq, MAX_COUNTED + 1)
            found[request.id] = reason_at(deps, request, ahead, room)
    return found


def reason_of(ahead: int, *, room: int, is_short: bool) -> str:
    """Return why a request waits, from the numbers of requests ahead and of free workers."""
    if ahead < room and not is_short:
        return "about to start"
    if not ahead:
        return "waiting for a free worker"
    many = f"more than {MAX_COUNTED} requests" if ahead > MAX_COUNTED else plural(ahead, "request")
    memory = ", the first of which waits for memory" if is_short else ""
    return f"queued behind {many}{memory}"


def reason_at(deps: Dependencies, request: Request, ahead: int, room: int) -> str:
    """Return why a request waits, by how many are before it; `room` is as of `reason_of`."""
    claimer = deps.dispatcher.claimer
    if shortage := claimer.shortages.get(request.id):
        is_update = request.payload.get("replaces") is not None
        both = "; an update needs memory for both generations at once"
        return shortage.sentence() + (both if is_update else "")
    return reason_of(ahead, room=room, is_short=claimer.is_short(request.schedule))


async def _retries(deps: Dependencies, requests: Sequence[Request]) -> dict[str, Json]:
    """Return the last death for memory of each request that had one, by the request's id."""
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
