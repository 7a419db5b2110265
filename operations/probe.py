# SPDX-License-Identifier: Apache-2.0
"""`probe`: whether an environment answers, and how quickly."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from ..environments.http_get import ask, base_url_by_name
from ..environments.layout import Layout
from ..system.access_tokens import without_token
from . import base


class ProbePayload(base.Payload):
    """The environment to ask."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="Time limit.")


class Probe(base.Operation):
    """Asks `/health` once."""

    name = "probe"
    summary = "Check whether an environment answers, and how quickly."
    Payload = ProbePayload

    @staticmethod
    def run(payload: ProbePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"name", "address", "health", "seconds"}`: connecting included.

        Raises:
            NotAnswering
        """
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
        started = time.monotonic()
        health = ask(base_url, "/health", payload.timeout_seconds)
        seconds = time.monotonic() - started
        address, _ = without_token(base_url)
        return {"name": payload.name, "address": address, "health": health, "seconds": seconds}
