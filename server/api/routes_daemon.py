# SPDX-License-Identifier: Apache-2.0
"""The routes of the daemon itself: its status, limits, health, end and metrics; the gateway's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ...environments.strays import stray_of, strays_seen
from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from .dependencies import Dependencies, Injected
from .metrics import render_metrics
from .request_notes import reasons, retries
from .routes_environments import environment_views
from .views import daemon_view, exit_views, request_view

ACTIVE = [RequestState.PENDING, RequestState.RUNNING]
MAX_ACTIVE = 200
RECENT = 10
LOOKED_AT = 100  # among which the recent ones are chosen
# Of no interest once they have gone well: what they have done is seen in the environments, or was
# their answer.
SOON_FORGOTTEN = frozenset({"check", "describe", "down", "down_strays", "probe", "prune"})

router = APIRouter()
root = APIRouter()


@router.get("/status")
async def status(deps: Injected) -> Json:
    """The daemon, its environments, strays, and the requests that are active or ended lately.

    A launch that failed is a request, and no environment.
    """
    store = deps.store
    active = await store.read(queries.list_requests(states=ACTIVE, limit=MAX_ACTIVE))
    ended = [state for state in RequestState if state.is_final]
    latest = await store.read(queries.list_requests(states=ended, limit=LOOKED_AT))
    failed = await store.read(queries.NEVER_LAUNCHED)
    recent = worth_showing(latest, failed)
    names = {launch.environment for launch in failed}
    environments = [e for e in await environment_views(deps) if e["name"] not in names]
    shown = [*active, *recent]
    watch = deps.reconciler.gateway.watch
    gateway = None if watch is None else watch.status
    why, again = await reasons(deps, active), await retries(deps, shown)
    return {
        "daemon": await _daemon(deps, environments),
        "environments": environments,
        "gateway": {"exits": exit_views(gateway, server="Envoy")},
        "strays": await _strays(deps),
        "requests": [request_view(r, why.get(r.id), again.get(r.id)) for r in shown],
    }


async def _strays(deps: Dependencies) -> list[Json]:
    """What runs and nobody has written down."""
    local = deps.reconciler.replicas.strays
    kept = [run_file for run_file in local if run_file.run_dir.exists()]
    return [*map(stray_of, kept), *await asyncio.to_thread(strays_seen, deps.paths)]


def worth_showing(ended: Iterable[Request], failed: Iterable[Request]) -> list[Request]:
    """Of requests that have ended, those that `status` has room for; the newest first, as given.

    The launches that `failed` are among them however old they are: of their environments, nothing
    else is shown.
    """
    kept = (
        request
        for request in ended
        if request.operation not in SOON_FORGOTTEN or request.state is not RequestState.SUCCEEDED
    )
    recent = list(islice(kept, RECENT))
    known = {request.id for request in recent}
    return recent + [launch for launch in failed if launch.id not in known]


@router.get("/info")
async def info(deps: Injected) -> Json:
    """The limits found on this machine, the plan, and the workers."""
    executor = deps.executor.status()
    return {
        "daemon": await _daemon(deps, await environment_views(deps)),
        "limits": deps.limits,
        "plan": executor.plan,
        "memory": {
            "free_burst_bytes": max(0, executor.free_burst_bytes),
            "available_bytes": max(0, executor.available_bytes),
            "waiting_for_memory": len(deps.dispatcher.claimer.shortages),
        },
        "memory_estimates": deps.dispatcher.recorder.estimates.to_json(),
        "workers": [asdict(worker) for worker in executor.workers],
        "settings": asdict(deps.settings),
    }


@router.get("/health")
async def health(deps: Injected) -> Json:
    """Whether the daemon answers."""
    return {"status": "ok", "version": deps.identity["version"]}


@router.get("/gateway")
async def gateway(deps: Injected) -> Json:
    """The gateway's address, process and environments; null where none runs."""
    return await deps.reconciler.gateway.status()


@router.post("/stop", status_code=202)
async def stop(deps: Injected) -> Json:
    """End the daemon. Environments go on; queued requests wait for the next one."""
    deps.stopping.set()
    return {"stopping": True, "pid": deps.identity["pid"]}


@root.get("/metrics")
async def metrics(deps: Injected) -> PlainTextResponse:
    """Prometheus' text format."""
    counts = await deps.store.read(queries.COUNTS)
    environments = await environment_views(deps)
    live, executor = deps.reconciler.replicas.live, deps.executor.status()
    lag = deps.lag.snapshot()
    page = render_metrics(counts, environments, live, executor, deps.dispatcher, lag)
    return PlainTextResponse(page)


async def _daemon(deps: Dependencies, environments: list[Json]) -> Json:
    sessions = sum(environment["sessions"] for environment in environments)
    counts = await deps.store.read(queries.COUNTS)
    uptime_seconds = time.monotonic() - deps.began_at
    return daemon_view(deps.identity, uptime_seconds, counts, sessions, deps.lag.snapshot())
