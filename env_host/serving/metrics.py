# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics` of an environment: its capacity (`ipc/capacity.py`) as Prometheus metrics.

All of it is read at scrape time. Counters begin anew with a shard's process.
"""

from __future__ import annotations

from typing import Any

from ...system.prometheus import metric_family

Json = dict[str, Any]

_GAUGES = (
    ("sessions", "Sessions open now."),
    ("max_sessions", "Sessions that may be open at once."),
    ("waiting", "Clients that wait for a session."),
    ("busy", "Calls of environments in progress."),
)
_COUNTERS = (
    ("connections", "Connections accepted."),
    ("sessions", "Sessions begun."),
    ("refused", "Sessions refused because there was no room."),
    ("handed_over", "Connections given to another shard."),
    ("steps", "Calls of step."),
    ("step_timeouts", "Calls that took too long."),
)


def render(name: str, capacity: Json) -> str:
    """Render the whole page of the environment called `name`."""
    shards = [({"environment": name, "shard": s["index"]}, s) for s in capacity["shards"]]
    pages = [
        metric_family(f"openenvd_shard_{key}", text, [(labels, s[key]) for labels, s in shards])
        for key, text in _GAUGES
    ]
    pages += [
        metric_family(
            f"openenvd_shard_{key}_total",
            text,
            [(labels, s["totals"][key]) for labels, s in shards],
            "counter",
        )
        for key, text in _COUNTERS
    ]
    return "".join([*pages, *_health(shards), _isolated(name, capacity)])


def _health(shards: list[tuple[Json, Json]]) -> list[str]:
    return [
        metric_family(
            "openenvd_shard_state",
            "What a shard does: alive, busy, wedged, starting, stopping, absent, parked.",
            [(labels | {"state": s["state"]}, 1) for labels, s in shards],
        ),
        metric_family(
            "openenvd_shard_heartbeat_seconds",
            "How long ago a shard's loop turned last.",
            [
                (labels, s["heartbeat_seconds"])
                for labels, s in shards
                if s["heartbeat_seconds"] is not None
            ],
        ),
        metric_family(
            "openenvd_shard_loop_lag_seconds",
            "How late a shard's loop was over the last minute; 1 is the longest.",
            [
                (labels | {"quantile": quantile}, s["lag"][key])
                for labels, s in shards
                for quantile, key in (
                    ("0.5", "p50_seconds"), ("0.99", "p99_seconds"), ("1", "max_seconds"),
                )
            ],
            "summary",
        ),
        metric_family(
            "openenvd_shard_longest_wait_seconds",
            "How long the first of those that wait for a session has waited.",
            [(labels, s["longest_wait_seconds"]) for labels, s in shards],
        ),
    ]  # fmt: skip


def _isolated(name: str, capacity: Json) -> str:
    return metric_family(
        "openenvd_isolated_sessions",
        "Sessions with a process of their own.",
        [({"environment": name}, len(capacity["isolated"]))],
    )
