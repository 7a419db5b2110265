# SPDX-License-Identifier: Apache-2.0
"""The daemon about itself: `/v1/status`, `/v1/info`, `/v1/health`, `/v1/stop`, `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ...requests_db.records import Json, Request
from ...requests_db.states import RequestState
from .dependencies import Services, ServicesDep
from .metrics import MemoryCounts, render_metrics
from .pending_reasons import reasons
from .routes_environments import environment_views
from .views import daemon_view, request_view

ACTIVE = [RequestState.PENDING, RequestState.RUNNING]
MAX_ACTIVE = 200
RECENT = 10
LOOKED_AT = 100  # among which the recent ones are chosen
# Of no interest once they have gone well: what they have done is seen in the environments, or was
# their answer.
SOON_FORGOTTEN = frozenset({"check", "describe", "down", "probe", "prune"})

router = APIRouter()
root = APIRouter()


@router.get("/status")
async def status(services: ServicesDep) -> Json:
    """The daemon, its environments, and the requests that are active or ended lately."""
    store = services.store
    active = await store.list_requests(states=ACTIVE, limit=MAX_ACTIVE)
    ended = [state for state in RequestState if state.is_final]
    recent = worth_showing(await store.list_requests(states=ended, limit=LOOKED_AT))
    environments = await environment_views(services)
    why = await reasons(services, active)
    return {
        "daemon": await _daemon(services, environments),
        "environments": environments,
        "requests": [request_view(r, why.get(r.id)) for r in [*active, *recent]],
    }


def worth_showing(ended: Iterable[Request]) -> list[Request]:
    """Of requests that have ended, the newest first: those that `status` has room for."""
    kept = (
        request
        for request in ended
        if request.operation not in SOON_FORGOTTEN or request.state is not RequestState.SUCCEEDED
    )
    return list(islice(kept, RECENT))


@router.get("/info")
async def info(services: ServicesDep) -> Json:
    """What was found on this machine, what is planned with it, and who works."""
    executor = services.executor.status()
    return {
        "daemon": await _daemon(services, await environment_views(services)),
        "limits": services.limits,
        "plan": executor.plan,
        "memory": {
            "free_burst_bytes": max(0, executor.free_burst_bytes),
            "available_bytes": max(0, executor.available_bytes),
            "waiting_for_memory": len(services.dispatcher.shortages),
        },
        "expectations": services.dispatcher.expectations.to_json(),
        "workers": [asdict(worker) for worker in executor.workers],
        "settings": asdict(services.settings),
    }


@router.get("/health")
async def health(services: ServicesDep) -> Json:
    """Whether the daemon answers."""
    return {"status": "ok", "version": services.identity["version"]}


@router.post("/stop", status_code=202)
async def stop(services: ServicesDep) -> Json:
    """End the daemon. Environments go on; queued requests wait for the next one."""
    services.stop()
    return {"stopping": True, "pid": services.identity["pid"]}


@root.get("/metrics")
async def metrics(services: ServicesDep) -> PlainTextResponse:
    """Prometheus' text format."""
    counts = await services.store.counts()
    environments = await environment_views(services)
    dispatcher = services.dispatcher
    memory = MemoryCounts(
        services.executor.status(), dispatcher.kills, dispatcher.retries, len(dispatcher.shortages)
    )
    live = services.reconciler.live
    page = render_metrics(counts, environments, memory, services.lag.snapshot(), live)
    return PlainTextResponse(page)


async def _daemon(services: Services, environments: list[Json]) -> Json:
    sessions = sum(environment["sessions"] for environment in environments)
    counts = await services.store.counts()
    return daemon_view(services.identity, counts, sessions, services.lag.snapshot())
