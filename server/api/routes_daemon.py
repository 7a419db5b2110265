# SPDX-License-Identifier: Apache-2.0
"""The routes of the daemon itself: its status, limits, health and metrics; the gateway's.

The metrics page is for Prometheus. All its values are read at scrape time; nothing is counted
twice. Names begin with `openenvd_`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ...environments.strays import stray_of, strays_seen
from ...executor.messages import ExecutorStatus
from ...requests_db.records import Request
from ...requests_db.sql import queries
from ...schema.replica import StatusLine
from ...schema.states import RequestState
from ...system.process.loop_lag import LagSnapshot
from ...system.text.json_lines import Json
from ...system.text.prometheus import Sample, metric_family
from ..dispatch.dispatcher import Dispatcher
from ..reconcile.gateway import gateway_problem
from .dependencies import Dependencies, Injected
from .routes_environments import environment_views
from .routes_requests import request_views
from .views import exit_views

# Name, key in what a replica says of itself, help.
_OF_REPLICAS = (
    ("max_sessions", "max_sessions", "Sessions that may be open at once."),
    ("waiting", "waiting", "Clients that wait for a session."),
    ("lag_p99_seconds", "lag_p99_seconds", "Event-loop lag of its slowest shard, over a minute."),
    ("lag_max_seconds", "lag_max_seconds", "Event-loop lag of its slowest shard, over a minute."),
    ("sessions_begun_total", "begun", "Sessions begun."),
    ("sessions_refused_total", "refused", "Sessions refused: there was no room."),
    ("steps_total", "steps", "Calls of step."),
    ("step_timeouts_total", "step_timeouts", "Calls that took too long."),
)
_HELP = {
    "requests": "Requests by state.",
    "environment_info": "Environments by state.",
    "sessions": "Sessions open now.",
    "replica_restarts": "Times a replica was started again.",
    "worker_resident_bytes": "Resident memory of a worker.",
    "worker_busy": "Whether a worker runs a request.",
    **{f"replica_{name}": text for name, _, text in _OF_REPLICAS},
    "replica_shards": "Shards by state.",
    "free_burst_bytes": "Memory that burst workers may still be expected to need.",
    "available_bytes": "Memory the machine would still give, less the reserve.",
    "requests_waiting_for_memory": "Requests at the head of the queue that wait for memory.",
    "out_of_memory_total": "Requests killed for memory, since the daemon started.",
    "out_of_memory_retries_total": "Of these, requests that run again with more.",
    "loop_lag_seconds": "How late the event loop was over the last minute; 1 is the longest.",
}


def render_metrics(
    counts: Mapping[str, int],
    environments: Sequence[Json],
    live: Mapping[str, StatusLine],
    executor: ExecutorStatus,
    dispatcher: Dispatcher,
    lag: LagSnapshot,
) -> str:
    """The whole page; `live` is the last status of each replica.

    What a replica reports of itself is seconds old; its own `/metrics` shows the same by shard.
    """
    workers, recorder = executor.workers, dispatcher.recorder
    replicas = [(env["name"], replica) for env in environments for replica in env["replicas"]]
    served: list[tuple[dict[str, str], Mapping[str, Any]]] = [
        ({"environment": name, "replica": replica["id"]}, capacity)
        for name, replica in replicas
        if (status := live.get(replica["id"])) and (capacity := status.get("capacity"))
    ]
    families: dict[str, list[Sample]] = {
        "requests": [({"state": state}, count) for state, count in counts.items()],
        "environment_info": [
            ({"environment": e["name"], "state": e["state"]}, 1) for e in environments
        ],
        "sessions": [({"environment": e["name"]}, e["sessions"]) for e in environments],
        "replica_restarts": [
            ({"environment": name, "replica": r["id"]}, r["restarts"]) for name, r in replicas
        ],
        "worker_resident_bytes": [
            ({"worker": w.name}, w.rss_bytes) for w in workers if w.rss_bytes is not None
        ],
        "worker_busy": [
            ({"worker": w.name, "schedule": w.schedule}, w.task_id is not None) for w in workers
        ],
    }
    for name, key, _ in _OF_REPLICAS:
        families[f"replica_{name}"] = [(labels, capacity[key]) for labels, capacity in served]
    quantiles = {"0.5": lag.p50_seconds, "0.99": lag.p99_seconds, "1": lag.max_seconds}
    families |= {
        "replica_shards": [
            (labels | {"state": state}, count)
            for labels, capacity in served
            for state, count in capacity["shards"].items()
        ],
        "free_burst_bytes": [({}, executor.free_burst_bytes)],
        "available_bytes": [({}, executor.available_bytes)],
        "requests_waiting_for_memory": [({}, len(dispatcher.claimer.shortages))],
        "out_of_memory_total": [
            ({"operation": name, "detector": detector}, count)
            for (name, detector), count in sorted(recorder.kills.copy().items())
        ],
        "out_of_memory_retries_total": [
            ({"operation": name}, count) for name, count in sorted(recorder.retries.copy().items())
        ],
        "loop_lag_seconds": [({"quantile": q}, seconds) for q, seconds in quantiles.items()],
    }
    page = ""
    for name, samples in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        kind = "summary" if name == "loop_lag_seconds" else kind
        page += metric_family(f"openenvd_{name}", _HELP[name], samples, kind)
    return page


ACTIVE = [RequestState.PENDING, RequestState.RUNNING]
MAX_ACTIVE = 200
RECENT = 10
LOOKED_AT = 100  # among which the recent ones are chosen
FAILED_LAUNCHES_SHOWN = 5  # the newest ones, of environments that were never launched
# Operations that are not shown once they have succeeded: their effect is seen in the environments,
# or was their answer.
SOON_FORGOTTEN = frozenset({"check", "describe", "down", "down_strays", "probe", "prune"})

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
    ended = [state for state in RequestState if state.is_final]
    latest = await store.read(queries.list_requests(states=ended, limit=LOOKED_AT))
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

    The launches that `failed` are among them however old they are, because nothing else is shown
    of their environments. So is every other failure that is given.
    """
    kept = [
        request
        for request in ended
        if request.operation not in SOON_FORGOTTEN or request.state is not RequestState.SUCCEEDED
    ]
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
    environments = await environment_views(deps, queries.environments())
    live, executor = deps.reconciler.replicas.live, deps.executor.status()
    lag = deps.lag.snapshot()
    page = render_metrics(counts, environments, live, executor, deps.dispatcher, lag)
    return PlainTextResponse(page)


async def _daemon(deps: Dependencies, environments: list[Json]) -> Json:
    return {
        **deps.identity,
        "uptime_seconds": time.monotonic() - deps.began_at,
        "requests": await deps.store.read(queries.COUNTS),
        "sessions": sum(environment["sessions"] for environment in environments),
        "loop": asdict(deps.lag.snapshot()),
    }
