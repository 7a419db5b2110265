# SPDX-License-Identifier: Apache-2.0
"""`down`, `down_strays`, `prune`: free what environments hold, and what was installed for them.

SHORT, so that launches never delay the freeing of memory. Strays are replicas that no one has
written down. The daemon knows which these are (`status`), and a worker does not: the request names
them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ...environments import run_files
from ...environments.strays import stop_stray
from ...schema.errors import EngineFailed
from ...schema.layout import Layout
from ...schema.operation_options import StopOptions
from . import base
from .progress import SessionsLeft

_NAME = "[A-Za-z0-9][A-Za-z0-9_.:-]*"
_ID = f"^{_NAME}(/{_NAME})*$"  # of a pod: NAMESPACE/NAME/UID


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
        stopped = run_files.stop_environment(
            runs, payload.name, payload.grace_seconds, on_sessions=left.note
        )
        for replica_id in stopped:
            base.say(f"stopped {replica_id}")
        if not stopped:
            base.say(f"no replica of {payload.name} was running")
        return {"environment": {"name": payload.name, "state": "STOPPED"}, "stopped": stopped}


class Stray(BaseModel):
    """One stray, as `status` shows it."""

    provider: str = Field(min_length=1, max_length=64)
    id: str = Field(min_length=1, max_length=256, pattern=_ID)


class DownStraysPayload(base.payload_of(StopOptions)):  # type: ignore[misc]  # made at run time
    """Which strays, and how long their sessions may take to end."""

    strays: list[Stray] = Field(max_length=1000, description="`provider` and `id` of each.")


class DownStrays(base.Operation):
    """Stops strays; stopping one again is fine."""

    name = "down_strays"
    summary = "Stop replicas that run without a record."
    Payload = DownStraysPayload

    @staticmethod
    def run(payload: DownStraysPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"stopped": [ids]}`.

        Raises:
            EngineFailed: Some could not be stopped; the others were.
        """
        layout = Layout(context.home)
        stopped, failed = [], []
        for stray in payload.strays:
            try:
                stop_stray(layout, stray.model_dump(), payload.grace_seconds)
            except EngineFailed as exc:
                failed.append(exc)
                base.say(f"{stray.id} of {stray.provider}: {exc.message}")
                continue
            stopped.append(stray.id)
            base.say(f"stopped {stray.id} of {stray.provider}")
        if failed:
            raise failed[0]
        return {"stopped": stopped}


class Prune(base.Operation):
    """Removes what the next launch of such a project makes again."""

    name = "prune"
    summary = "Remove projects' virtual environments and images that nothing uses."

    @staticmethod
    def run(payload: base.Payload, context: base.OperationContext) -> dict[str, Any]:
        """`{"removed": [{"path", "project", "used_at", "freed_bytes"}], "images", "freed_bytes"}`.

        `freed_bytes` is of virtual environments: images share their layers.
        """
        from ...environments.preparation.image_build import prune_images
        from ...environments.preparation.venv_cleanup import prune

        layout = Layout(context.home)
        removed = prune(layout)
        return {
            "removed": [each.to_json() for each in removed],
            "images": prune_images(layout),
            "freed_bytes": sum(each.freed_bytes for each in removed),
        }
