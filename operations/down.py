# SPDX-License-Identifier: Apache-2.0
"""`down`: stop an environment's replicas.

SHORT, so that launches never delay the freeing of memory.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..environments import run_files
from ..environments.layout import Layout
from . import base
from .options import StopOptions
from .progress import SessionsLeft


class DownPayload(base.payload_of(StopOptions)):  # type: ignore[misc]  # a class made at run time
    """The environment, and how long its sessions may take to end."""

    name: str = Field(min_length=1, description="The environment's name.")


class Down(base.Operation):
    """Stops one environment; stopping it again is fine."""

    name = "down"
    summary = "Stop an environment and free what it holds."
    Payload = DownPayload

    @staticmethod
    def run(payload: DownPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment": {"name", "state"}, "stopped": [replica ids]}`."""
        runs = Layout(context.home).runs
        found = run_files.of_environment(runs, payload.name)
        left = SessionsLeft(context, run_files.sessions_of(found), payload.grace_seconds)
        stopped = run_files.stop_all(found, payload.grace_seconds, left.note)
        for replica_id in stopped:
            base.say(f"stopped {replica_id}")
        if not stopped:
            base.say(f"no replica of {payload.name} was running")
        return {"environment": {"name": payload.name, "state": "STOPPED"}, "stopped": stopped}
