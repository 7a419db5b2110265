# SPDX-License-Identifier: Apache-2.0
"""Environments and requests as tables. rich is imported when one is drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..requests_db.states import EnvironmentState, ReplicaState, RequestState
from . import phrases

if TYPE_CHECKING:
    from rich.table import Table

_STYLES: dict[str, str] = {
    EnvironmentState.READY: "green",
    EnvironmentState.DEGRADED: "yellow",
    EnvironmentState.STARTING: "cyan",
    EnvironmentState.STOPPING: "cyan",
    RequestState.RUNNING: "cyan",
    RequestState.SUCCEEDED: "green",
    RequestState.FAILED: "red",
    RequestState.CANCELLED: "dim",
}

_WHOLE = ("ID", "STATE", "ADDRESS")  # to be read at a glance, or copied: others are folded first


def environments_table(environments: Sequence[dict[str, Any]], now: float | None = None) -> Table:
    """One line for each environment."""
    now = time.time() if now is None else now
    table = _new_table("ENVIRONMENT", "STATE", "ADDRESS", "SESSIONS", "REPLICAS", "SOURCE", "AGE")
    for environment in environments:
        table.add_row(
            environment["name"],
            _state(environment["state"]),
            environment["address"] or "-",
            _sessions(environment),
            _replicas(environment),
            environment.get("source") or "-",
            phrases.duration(now - environment["created_at"]),
        )
    return table


def requests_table(requests: Sequence[dict[str, Any]], now: float | None = None) -> Table:
    """One line for each request."""
    now = time.time() if now is None else now
    table = _new_table("REQUEST", "ID", "STATE", "WHEN", "")
    for request in requests:
        table.add_row(
            request["label"],
            phrases.short_id(request["id"]),
            _state(request["state"]),
            phrases.timing(request, now),
            _remark(request),
        )
    return table


def _new_table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in _WHOLE)
    return table


def _state(state: str) -> Any:
    from rich.text import Text

    return Text(state, style=_STYLES.get(state, ""))


def _sessions(environment: dict[str, Any]) -> str:
    most = environment.get("max_sessions")
    return f"{environment['sessions']}/{most}" if most else str(environment["sessions"])


def _replicas(environment: dict[str, Any]) -> str:
    replicas = environment["replicas"]
    ready = sum(replica["state"] == ReplicaState.READY for replica in replicas)
    return f"{ready}/{len(replicas)}" if replicas else "-"


def _remark(request: dict[str, Any]) -> str:
    if request.get("pending_reason"):
        return str(request["pending_reason"])
    if request["state"] == RequestState.RUNNING and request.get("cancel_requested_at"):
        return "being cancelled"
    if request.get("error"):
        return str(request["error"]["message"]).partition("\n")[0]
    return ""
