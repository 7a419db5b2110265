# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics` of an environment: the board in Prometheus' text exposition format 0.0.4.

All of it is read off at scrape time (`capacity.py`). Counters begin anew with a shard's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Json = dict[str, Any]
Sample = tuple[Mapping[str, Any], float]

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
    """The whole page; `name` is the environment's."""
    shards = [({"environment": name, "shard": s["index"]}, s) for s in capacity["shards"]]
    pages = [
        _family(f"openenvd_shard_{key}", text, [(labels, s[key]) for labels, s in shards])
        for key, text in _GAUGES
    ]
    pages += [
        _family(
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
        _family(
            "openenvd_shard_state",
            "What a shard does: alive, busy, wedged, unresponsive, starting, stopping, absent.",
            [(labels | {"state": s["state"]}, 1) for labels, s in shards],
        ),
        _family(
            "openenvd_shard_heartbeat_seconds",
            "How long ago a shard's loop turned last.",
            [
                (labels, s["heartbeat_seconds"])
                for labels, s in shards
                if s["heartbeat_seconds"] is not None
            ],
        ),
        _family(
            "openenvd_shard_loop_lag_seconds",
            "How late a shard's loop was over the last minute; 1 is the longest.",
            [
                (labels | {"quantile": quantile}, s["lag"][key])
                for labels, s in shards
                for quantile, key in (
                    ("0.5", "p50_seconds"), ("0.99", "p99_seconds"), ("1", "max_seconds"),
                )
            ],
        ),
        _family(
            "openenvd_shard_longest_wait_seconds",
            "How long the first of those that wait for a session has waited.",
            [(labels, s["longest_wait_seconds"]) for labels, s in shards],
        ),
    ]  # fmt: skip


def _isolated(name: str, capacity: Json) -> str:
    return _family(
        "openenvd_isolated_sessions",
        "Sessions with a process of their own.",
        [({"environment": name}, len(capacity["isolated"]))],
    )


def _family(name: str, text: str, samples: Iterable[Sample], kind: str = "gauge") -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {float(value):g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    return "{" + ",".join(f'{key}="{_escape(str(value))}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
