# SPDX-License-Identifier: Apache-2.0
"""`probe`: whether an environment answers, and how quickly."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import Field

from ..environments.http_get import address_by_name, ask
from ..environments.layout import Layout
from ..system.units import MB
from . import base


class ProbePayload(base.Payload):
    """Which environment."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="How long it may take.")


class Probe:
    """Asks `/health` once."""

    name: ClassVar[str] = "probe"
    summary: ClassVar[str] = "Whether an environment answers, and how quickly."
    schedule: ClassVar[str] = "SHORT"
    idempotent: ClassVar[bool] = True
    max_attempts: ClassVar[int] = 3
    expected_bytes: ClassVar[int] = 30 * MB
    leaves_bytes: ClassVar[int] = 0
    Payload: ClassVar[type[base.Payload]] = ProbePayload

    @staticmethod
    def run(payload: ProbePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"name", "address", "health", "seconds"}`: connecting included.

        Raises:
            NotAnswering
        """
        address = address_by_name(Layout(context.home).runs, payload.name)
        started = time.monotonic()
        health = ask(address, "/health", payload.timeout_seconds)
        seconds = time.monotonic() - started
        return {"name": payload.name, "address": address, "health": health, "seconds": seconds}
