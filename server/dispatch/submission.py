# SPDX-License-Identifier: Apache-2.0
"""From an accepted payload to a durable request.

Decides what an operation changes in the environment that it names, and writes that together with
the request: a source that names nothing is refused; `launch` takes the name, or updates what runs
under it; `down` marks the environment as stopping (and cancels launches that are still under way).
Everything else happens in the worker, and the reconciler observes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...environments.sources.repository import is_repository, pin
from ...environments.sources.resolve import check_source
from ...requests_db import records
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, NewRequest, Request, label_of
from ...requests_db.sql import queries
from ...requests_db.sql.rows import QueueClock
from ...requests_db.transactions import submitting
from ...schema.errors import EnvironmentsError
from ...schema.settings import Settings
from ...schema.spec import sleep_seconds_of, validate_name
from ...schema.states import EnvironmentState, Schedule
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ...system.text.units import near_matches, plural
from .. import errors
from ..events import EventBus
from ..operations import registry
from ..operations.base import Operation
from .request_traces import RequestTraces

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

FROM_SOURCE = ("launch", "build_image")
# A repository that does not answer blocks a thread; the daemon's others serve the whole API.
_PINNING = ThreadPoolExecutor(4, "repositories")
_NOT_SERVING = {
    EnvironmentState.PENDING: "waiting to be launched",
    EnvironmentState.STARTING: "being launched",
    EnvironmentState.STOPPING: "being taken down",
    EnvironmentState.STOPPED: "not running",
    EnvironmentState.FAILED: "not running: it has failed",
}


def request_of(operation: type[Operation], payload: Json, **options: Any) -> NewRequest:
    """Make a request of a valid payload; `options` are a client's other choices, by field."""
    return NewRequest(
        operation=operation.name,
        schedule=Schedule(operation.schedule),
        payload=payload,
        environment=payload.get("name"),
        max_attempts=operation.max_attempts,
        **options,
    )


@dataclass(frozen=True, slots=True)
class Submitter:
    """Writes requests, cancels them, and finds them again.

    Refusals are `ApiError`s: `NotFound` (with near matches of a name) or `AmbiguousId` if an id or
    a name does not find one, and others as their classes say. After a refusal, or a
    `DatabaseError`, nothing has been written.
    """

    store: AsyncStore
    dispatcher: Dispatcher
    bus: EventBus
    settings: Settings
    clock: QueueClock = field(default_factory=QueueClock)
    traces: RequestTraces = field(default_factory=RequestTraces)
    # Returns the commits that are here, by the addresses of their repositories.
    fetched: Callable[[], Mapping[str, str]] = dict

    async def submit(self, new: NewRequest) -> Request:
        """Write the request, and all that it changes, in one transaction."""
        if new.operation in FROM_SOURCE:
            try:
                await asyncio.to_thread(check_source, new.payload)
                new = replace(new, payload=await self._pinned(new.payload))
            except EnvironmentsError as exc:
                raise errors.Invalid(exc.message, exc.hint, field="source") from exc
        new = self.traces.traced(new)
        changes: dict[str, Any] = {}
        if new.operation == "launch":
            now = time.time()
            try:
                name = validate_name(str(new.environment))
            except EnvironmentsError as exc:
                raise errors.Invalid(str(exc), exc.hint, field="name") from exc
            launched = Environment(name, new.payload, EnvironmentState.PENDING, now, now)
            changes["environment"] = launched
        elif new.operation == "down":
            environment = await self.environment(str(new.environment))
            # A request with a key may repeat the `down` that stopped it, so it is no error.
            if environment.state is EnvironmentState.STOPPED and new.idempotency_key is None:
                raise errors.NotFound(
                    f"{new.environment} has been taken down already",
                    "openenv status lists the rest",
                )
            changes["stopping"] = new.environment
        elif new.operation in submitting.ALTERING:
            await self.environment(str(new.environment))
            changes["changing"] = new.environment
        return await self._write(new, changes)

    async def _pinned(self, payload: Json) -> Json:
        """Return a payload whose source, if it is a repository, names a commit."""
        if not is_repository(source := payload["source"]):
            return payload
        loop = asyncio.get_running_loop()
        pinned = await loop.run_in_executor(_PINNING, lambda: pin(source, self.fetched()))
        return payload | {"source": pinned}

    async def retry(self, request_id: str, limits: Mapping[str, int]) -> Request:
        """Submit an ended request again, found by its id or the beginning of its id.

        If an environment of that name runs by now, a launch updates it. If this very launch still
        runs, its scaled number of replicas is kept; otherwise the payload's is used. `limits` are
        the memory limits, by name, that replace those of the payload.
        """
        request = await self.find(request_id)
        if not request.state.is_final:
            text = f"request {request.id} is {request.state.lower()}: only what ended can run again"
            raise errors.Invalid(text, f"openenv wait {request.id}")
        for name in limits:
            if name not in request.payload:
                raise errors.Invalid(f"a {request.operation} has no such memory limit", field=name)
        payload = {**request.payload, **limits}
        if request.operation == "launch":
            running = await self.store.read(queries.environment(str(request.environment)))
            if running is not None and running.request_id == request.id:
                spec, is_stopped = running.spec, running.state is EnvironmentState.STOPPED
                # Automatic scaling and sleep choose the replicas themselves, so none are kept.
                scales_itself = payload.get("max_replicas") or spec.get("max_replicas")
                decides_itself = scales_itself or sleep_seconds_of(payload) is not None
                if not (is_stopped or decides_itself) and spec.get("replicas") is not None:
                    payload["replicas"] = spec["replicas"]
            payload |= {"update": True, "replaces": None}
        again = request_of(
            registry.OPERATIONS[request.operation],
            payload,
            priority=request.priority,
            timeout_seconds=request.timeout_seconds,
            retry_oom=request.retry_oom,
        )
        return await self.submit(again)

    async def submit_own(self, name: str, given: dict[str, Any]) -> None:
        """Submit a request of the daemon's own; its `reason` is in the history."""
        operation = registry.OPERATIONS[name]
        payload = operation.Payload.model_validate(given).model_dump(mode="json")
        await self.submit(request_of(operation, payload))

    async def _write(self, new: NewRequest, changes: dict[str, Any]) -> Request:
        """Write the request; `changes` are further arguments of `submitting.submit`."""
        outcome = await self.store.write(
            submitting.submit,
            new,
            now=time.time(),
            arrival=self.clock.now(),
            max_pending=self.settings.max_pending,
            **changes,
        )
        match outcome:
            case records.Submitted():
                self.bus.publish(outcome.events)
                for request_id in outcome.ends:
                    self.dispatcher.claimer.cancel(request_id)
                self.dispatcher.submitted(new.schedule)
                return outcome.request
            case records.Duplicate():
                return outcome.request
            case records.CannotChange():
                launch = queries.request(outcome.environment.request_id or "")
                is_known = await self.store.read(launch) is not None
                raise _cannot_change(outcome.environment, outcome.change, launch_is_known=is_known)
        raise _refusal(new, outcome)

    async def cancel(self, request_id: str) -> records.Cancellation:
        """Cancel at once, never through the queue."""
        request = await self.find(request_id)
        if request.operation == "down" and not request.state.is_final:
            raise errors.Invalid(
                "a `down` cannot be cancelled: half of it may be done", "launch it again"
            )
        cancelled = await self.store.write(submitting.cancel, request.id, time.time())
        if cancelled is None:
            raise _no_request(request_id)
        self.bus.publish(cancelled.events)
        if cancelled.is_under_way:
            self.dispatcher.claimer.cancel(request.id)
        return cancelled

    async def find(self, request_id: str) -> Request:
        """Find the request with this id or id prefix."""
        found = await self.store.read(queries.get(request_id))
        if isinstance(found, Request):
            return found
        if not found:
            raise _no_request(request_id)
        text = f"{request_id!r} fits {len(found)} requests"
        raise errors.AmbiguousId(text, "write more of the id", matches=list(found))

    async def environment(self, name: str) -> Environment:
        """Return the environment of this name."""
        environment = await self.store.read(queries.environment(name))
        if environment is None:
            names = await self.store.read(queries.NAMES)
            none = "none runs; openenv launch SOURCE starts one"
            near, hint = near_matches(name, names, "openenv status lists them" if names else none)
            raise errors.NotFound(f"no environment is called {name!r}", hint, near=near)
        return environment


def _refusal(new: NewRequest, why: records.Impossible) -> errors.ApiError:
    """Return the error that says why nothing was written, and what to do."""
    match why:
        case records.KeyReused(first):
            asked = label_of(new)
            if asked == label_of(first):
                asked = f"{asked} with another payload"
            return errors.KeyReused(
                f"the idempotency key {new.idempotency_key!r} is that of {label_of(first)} (request"
                f" {first.id}); it cannot be used for {asked}",
                "send another key with another request",
                request_id=first.id,
                operation=first.operation,
            )
        case records.NameTaken(holder):
            name, address = holder.name, holder.address
            where = f" at {address}" if address else ""
            found = f"{name} is {holder.state.value.lower()} already{where}"
            hint = f"launch it under another --name, or take it down: openenv down {name}"
            if holder.state in (EnvironmentState.PENDING, EnvironmentState.STARTING):
                hint = f"wait for that: openenv wait {holder.request_id}"
            return errors.NameTaken(found, hint, address=address, environment=name)
        case records.OtherSource(holder):
            name, address = holder.name, holder.address
            runs, wanted = (hide_credentials(s.get("source")) for s in (holder.spec, new.payload))
            found = f"{name} runs from another source: {runs}, not {wanted}"
            hint = f"launch this one under another --name; to update {name} to it, add --update"
            return errors.NameTaken(found, hint, address=address, environment=name)
        case records.BeingUpdated(generation):
            name, launch = generation.environment, generation.request_id
            found = f"{name} is being updated to generation {generation.number} already"
            hint = f"wait for it (openenv status {name}), or cancel it: openenv cancel {launch[:8]}"
            return errors.NameTaken(
                f"{found} (request {launch})", hint, environment=name, request_id=launch
            )
        case records.QueueFull(pending):
            return errors.QueueFull(
                f"the queue has {plural(pending, f'{new.schedule} request')} already",
                "wait for some to finish (openenv requests), or raise OPENENV_MAX_PENDING",
            )


def _cannot_change(
    environment: Environment, change: Request | None, *, launch_is_known: bool
) -> errors.CannotChange:
    name = environment.name
    if change is not None:
        return errors.CannotChange(
            f"{name} has a {change.operation} under way already (request {change.id})",
            f"wait for that: openenv wait {change.id}",
            request_id=change.id,
            environment=name,
        )
    hint = (
        f"wait until it is down (openenv status {name}), then launch it again"
        if environment.state is EnvironmentState.STOPPING
        else f"wait until it is ready: openenv status {name}"
        if environment.state.is_live
        else f"launch it again: openenv retry {environment.request_id}"
        if launch_is_known
        else "launch it again: openenv launch SOURCE"
    )
    return errors.CannotChange(
        f"{name} is {_NOT_SERVING[environment.state]}", hint, environment=name
    )


def _no_request(request_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"no request has the id {request_id!r}", "openenv requests lists them", near=[]
    )
