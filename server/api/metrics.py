# SPDX-License-Identifier: Apache-2.0
"""The metrics page, for Prometheus.

All values are read at scrape time; nothing is counted twice. Names begin with `openenvd_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...executor.messages import ExecutorStatus
from ...system.process.loop_lag import LagSnapshot
from ...system.text.json_lines import Json
from ...system.text.prometheus import metric_family
from ..dispatch.dispatcher import Dispatcher

# Name, key in what a replica says of itself, help; a name that ends so is a counter.
_COUNTED = "_total"
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


def render_metrics(
    counts: Mapping[str, int],
    environments: Sequence[Json],
    live: Mapping[str, Json],
    executor: ExecutorStatus,
    dispatcher: Dispatcher,
    lag: LagSnapshot,
) -> str:
    """The whole page; `live` is the last status of each replica."""
    workers = executor.workers
    replicas = [(env["name"], replica) for env in environments for replica in env["replicas"]]
    served = [
        ({"environment": name, "replica": replica["id"]}, capacity)
        for name, replica in replicas
        if (capacity := live.get(replica["id"], {}).get("capacity"))
    ]
    families = [
        metric_family(
            "openenvd_requests",
            "Requests by state.",
            [({"state": state}, count) for state, count in counts.items()],
        ),
        metric_family(
            "openenvd_environment_info",
            "Environments by state.",
            [({"environment": e["name"], "state": e["state"]}, 1) for e in environments],
        ),
        metric_family(
            "openenvd_sessions",
            "Sessions open now.",
            [({"environment": e["name"]}, e["sessions"]) for e in environments],
        ),
        metric_family(
            "openenvd_replica_restarts",
            "Times a replica was started again.",
            [({"environment": name, "replica": r["id"]}, r["restarts"]) for name, r in replicas],
        ),
        metric_family(
            "openenvd_worker_resident_bytes",
            "Resident memory of a worker.",
            [({"worker": w.name}, w.rss_bytes) for w in workers if w.rss_bytes is not None],
        ),
        metric_family(
            "openenvd_worker_busy",
            "Whether a worker runs a request.",
            [({"worker": w.name, "schedule": w.schedule}, w.task_id is not None) for w in workers],
        ),
        *_capacity_families(served),
        *_memory_families(executor, dispatcher),
        _loop_lag(lag),
    ]
    return "".join(families)


def _capacity_families(served: Sequence[tuple[dict[str, str], Json]]) -> list[str]:
    """Render what each replica reported of itself within the last seconds.

    Its own `/metrics` shows the same by shard and as of now.
    """
    families = [
        metric_family(
            f"openenvd_replica_{name}",
            text,
            [(each, capacity[key]) for each, capacity in served],
            "counter" if name.endswith(_COUNTED) else "gauge",
        )
        for name, key, text in _OF_REPLICAS
    ]
    states = [
        (each | {"state": state}, count)
        for each, capacity in served
        for state, count in capacity["shards"].items()
    ]
    return [*families, metric_family("openenvd_replica_shards", "Shards by state.", states)]


def _memory_families(executor: ExecutorStatus, dispatcher: Dispatcher) -> list[str]:
    kills = sorted(dispatcher.recorder.kills.copy().items())  # by operation and detector
    retries = sorted(dispatcher.recorder.retries.copy().items())
    return [
        metric_family(
            "openenvd_free_burst_bytes",
            "Memory that burst workers may still be expected to need.",
            [({}, executor.free_burst_bytes)],
        ),
        metric_family(
            "openenvd_available_bytes",
            "Memory the machine would still give, less the reserve.",
            [({}, executor.available_bytes)],
        ),
        metric_family(
            "openenvd_requests_waiting_for_memory",
            "Requests at the head of the queue that wait for memory.",
            [({}, len(dispatcher.claimer.shortages))],
        ),
        metric_family(
            "openenvd_out_of_memory_total",
            "Requests killed for memory, since the daemon started.",
            [({"operation": name, "detector": detector}, n) for (name, detector), n in kills],
            "counter",
        ),
        metric_family(
            "openenvd_out_of_memory_retries_total",
            "Of these, requests that run again with more, since the daemon started.",
            [({"operation": name}, count) for name, count in retries],
            "counter",
        ),
    ]


def _loop_lag(lag: LagSnapshot) -> str:
    quantiles = {"0.5": lag.p50_seconds, "0.99": lag.p99_seconds, "1": lag.max_seconds}
    return metric_family(
        "openenvd_loop_lag_seconds",
        "How late the event loop was over the last minute; 1 is the longest.",
        [({"quantile": quantile}, seconds) for quantile, seconds in quantiles.items()],
        "summary",
    )
