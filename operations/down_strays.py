# SPDX-License-Identifier: Apache-2.0
"""`down_strays`: stop what runs and nobody has written down.

The daemon knows which these are (`status`), and a worker does not: the request names them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ..environments.errors import EngineFailed
from ..environments.layout import Layout
from ..environments.strays import stop_stray
from . import base
from .options import StopOptions

_NAME = "[A-Za-z0-9][A-Za-z0-9_.:-]*"
_ID = f"^{_NAME}(/{_NAME})*$"  # of a pod: NAMESPACE/NAME/UID


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
    summary = "Stop replicas that nobody has written down."
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
