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


class DownPayload(base.Payload):
    """The environment, and how long its sessions may take to end."""

    name: str = Field(min_length=1, description="The environment's name.")
    grace_seconds: float = Field(
        run_files.GRACE_SECONDS,
        ge=0,
        le=600,
        description="How long sessions may take to end, before the replicas are killed.",
    )


class Down(base.Operation):
    """Stops one environment; stopping it again is fine."""

    name = "down"
    summary = "Stop an environment and free what it holds."
    Payload = DownPayload

    @staticmethod
    def run(payload: DownPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment": {"name", "state"}, "stopped": [replica ids]}`."""
        runs = Layout(context.home).runs
        stopped = run_files.stop_environment(runs, payload.name, payload.grace_seconds)
        for replica_id in stopped:
            base.say(f"stopped {replica_id}")
        if not stopped:
            base.say(f"no replica of {payload.name} was running")
        return {"environment": {"name": payload.name, "state": "STOPPED"}, "stopped": stopped}
