# SPDX-License-Identifier: Apache-2.0
"""The routes of the daemon itself: its status, limits, health and metrics; the gateway's.

The metrics page is for Prometheus. All its values are read at scrape time; nothing is counted
twice. Names begin with `openenvd_`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ...environments.strays import stray_of, strays_seen
from ...executor.messages import ExecutorStatus
from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.replica import StatusLine
from ...schema.states import FINAL_STATES, RequestState, Schedule
from ...system.process.loop_lag import LagSnapshot
from ...system.text.json_lines import Json
from ...system.text.prometheus import Sample, metric_family
from ..dispatch.dispatcher import Dispatcher
from ..reconcile.gateway import gateway_problem
from .dependencies import Dependencies, Injected
from .routes_environments import environment_views
from .routes_requests import request_views
from .views import exit_views

# Of what a replica reports of itself: the metric's name, the key, help.
_OF_REPLICAS = (
    ("replica_max_sessions", "max_sessions", "Sessions that may be open at once."),
    ("replica_waiting", "waiting", "Clients that wait for a session."),
    ("replica_lag_p99_seconds", "lag_p99_seconds", "Loop lag of its slowest shard, over a minute."),
    ("replica_sessions_refused_total", "refused", "Sessions refused: there was no room."),
    ("replica_steps_total", "steps", "Calls of step."),
    ("replica_step_timeouts_total", "step_timeouts", "Calls that took too long."),
)


def metric_families(
    counts: Mapping[str, int],
    environments: Sequence[Json],
    live: Mapping[str, StatusLine],
    executor: ExecutorStatus,
    dispatcher: Dispatcher,
    lag: LagSnapshot,
) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    """Yield the name, the help and the samples of each metric.

    `live` is the last status of each replica. What a replica reports of itself is seconds old; its
    own `/metrics` shows the same by shard.
    """
    yield "requests", "Requests by state.", [({"state": s}, n) for s, n in counts.items()]
    named = [({"environment": e["name"]}, e) for e in environments]
    states = [(who | {"state": e["state"]}, 1) for who, e in named]
    yield "environment_info", "Environments by state.", states
    yield "sessions", "Sessions open now.", [(who, e["sessions"]) for who, e in named]
    replicas = [(who | {"replica": r["id"]}, r) for who, e in named for r in e["replicas"]]
    restarts = [(who, r["restarts"]) for who, r in replicas]
    yield "replica_restarts", "Times a replica was started again.", restarts
    served: list[tuple[Json, Mapping[str, Any]]] = [
        (who, capacity)
        for who, r in replicas
        if (capacity := live.get(r["id"], {}).get("capacity"))
    ]
    for name, key, text in _OF_REPLICAS:
        yield name, text, [(who, capacity[key]) for who, capacity in served]
    workers = [({"worker": w.name}, w) for w in executor.workers]
    sizes = [(who, w.rss_bytes) for who, w in workers if w.rss_bytes]
    yield "worker_resident_bytes", "Resident memory of a worker.", sizes
    busy = [(who | {"schedule": w.schedule}, bool(w.task_id)) for who, w in workers]
    yield "worker_busy", "Whether a worker runs a request.", busy
    text = "Memory that burst workers may still be expected to need."
    yield "free_burst_bytes", text, [({}, executor.free_burst_bytes)]
    text = "Memory the machine would still give, less the reserve."
    yield "available_bytes", text, [({}, executor.available_bytes)]
    text = "Requests at the head of the queue that wait for memory."
    yield "requests_waiting_for_memory", text, [({}, len(dispatcher.claimer.shortages))]
    recorder = dispatcher.recorder
    kills, retries = sorted(recorder.kills.copy().items()), sorted(recorder.retries.copy().items())
    killed = [({"operation": o, "detector": d}, n) for (o, d), n in kills]
    yield "out_of_memory_total", "Requests killed for memory, since the daemon started.", killed
    again = [({"operation": o}, n) for o, n in retries]
    yield "out_of_memory_retries_total", "Of these, requests that run again with more.", again
    quantiles = {"0.5": lag.p50_seconds, "0.99": lag.p99_seconds, "1": lag.max_seconds}
    text = "How late the event loop was over the last minute; 1 is the longest."
    yield "loop_lag_seconds", text, [({"quantile": q}, late) for q, late in quantiles.items()]


ACTIVE = [RequestState.PENDING, RequestState.RUNNING]
MAX_ACTIVE = 200
RECENT = 10
LOOKED_AT = 100  # among which the recent ones are chosen
FAILED_LAUNCHES_SHOWN = 5  # the newest ones, of environments that were never launched

router = APIRouter()
root = APIRouter()


@router.get("/status")
async def status(deps: Injected, all_failed: bool = False) -> Json:
    """The daemon, its environments, strays, and the requests that are active or ended lately.

    Failed launches are listed as requests, not as environments: the newest, or all. A stray is a
    replica that runs although the database has no record of it.
    """
    store = deps.store
    active = await store.read(queries.list_requests(states=ACTIVE, limit=MAX_ACTIVE))
    latest = await store.read(queries.list_requests(states=FINAL_STATES, limit=LOOKED_AT))
    count = await store.read(queries.NEVER_LAUNCHED_COUNT)
    # Recent requests may be more of them than those that are shown in any case.
    failed = await store.read(queries.never_launched(count if all_failed else RECENT))
    recent = worth_showing(latest, failed if all_failed else failed[:FAILED_LAUNCHES_SHOWN])
    shown_failed = {each.id for each in failed} & {each.id for each in recent}
    environments = await environment_views(deps, queries.LAUNCHED_ENVIRONMENTS)
    gateway = deps.reconciler.gateway
    envoy = None if gateway.process.watch is None else gateway.process.watch.status
    problem = None if envoy is None else await gateway_problem(gateway.layout)
    local = [each for each in deps.reconciler.leftovers.strays if each.run_dir.exists()]
    return {
        "daemon": await _daemon(deps, environments),
        "environments": environments,
        "gateway": {"exits": exit_views(envoy, server="Envoy"), "problem": problem},
        "strays": [*map(stray_of, local), *await asyncio.to_thread(strays_seen, deps.paths)],
        "requests": await request_views(deps, [*active, *recent]),
        "failed_launches_left_out": max(0, count - len(shown_failed)),
    }


def worth_showing(ended: Iterable[Request], failed: Iterable[Request]) -> list[Request]:
    """Return the ended requests that `status` has room for; the newest first, as given.

    A SHORT request that has succeeded is left out: its effect is seen, or was its answer.
    The launches that `failed` are among them however old they are, because nothing else is shown
    of their environments. So is every other failure that is given.
    """
    succeeded = RequestState.SUCCEEDED
    kept = [r for r in ended if r.schedule is Schedule.LONG or r.state is not succeeded]
    recent = kept[:RECENT]
    recent += [
        r for r in kept[RECENT:] if r.state is RequestState.FAILED and r.operation != "launch"
    ]
    known = {request.id for request in recent}
    return recent + [launch for launch in failed if launch.id not in known]


@router.get("/info")
async def info(deps: Injected) -> Json:
    """The limits found on this machine, the plan, and the workers."""
    executor = deps.executor.status()
    environments = await environment_views(deps, queries.LAUNCHED_ENVIRONMENTS)
    return {
        "daemon": await _daemon(deps, environments),
        "limits": deps.limits,
        "plan": executor.plan,
        "memory": {
            "free_burst_bytes": max(0, executor.free_burst_bytes),
            "available_bytes": max(0, executor.available_bytes),
        },
        "workers": [asdict(worker) for worker in executor.workers],
        "settings": asdict(deps.settings),
    }


@router.get("/health")
async def health(deps: Injected) -> Json:
    """Return whether the daemon answers."""
    return {"status": "ok", "version": deps.identity["version"]}


@router.get("/gateway")
async def gateway(deps: Injected) -> Json:
    """The gateway's address, process and environments; null where none runs."""
    return await deps.reconciler.gateway.status()


@root.get("/metrics")
async def metrics(deps: Injected) -> PlainTextResponse:
    """Prometheus' text format."""
    counts = await deps.store.read(queries.COUNTS)
    environments = await environment_views(deps, queries.NOT_STOPPED)
    live, executor = deps.reconciler.replicas.live, deps.executor.status()
    lag = deps.lag.snapshot()
    families = metric_families(counts, environments, live, executor, deps.dispatcher, lag)
    page = ""
    for name, text, samples in families:
        kind = "counter" if name.endswith("_total") else "gauge"
        kind = "summary" if name == "loop_lag_seconds" else kind
        page += metric_family(f"openenvd_{name}", text, samples, kind)
    return PlainTextResponse(page)


async def _daemon(deps: Dependencies, environments: list[Json]) -> Json:
    return {
        **deps.identity,
        "uptime_seconds": time.monotonic() - deps.began_at,
        "requests": await deps.store.read(queries.COUNTS),
        "sessions": sum(environment["sessions"] for environment in environments),
        "loop": asdict(deps.lag.snapshot()),
    }
