# SPDX-License-Identifier: Apache-2.0
"""`probe`: an environment answers; `describe`: its metadata and schemas."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from ...environments.access import ask, base_url_by_name
from ...schema.layout import Layout
from ...system.net.access import without_token
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
        """`{"name", "address", "health", "seconds"}`: connecting included."""
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
        started = time.monotonic()
        health = ask(base_url, "/health", payload.timeout_seconds)
        return {
            "name": payload.name,
            "address": without_token(base_url)[0],
            "health": health,
            "seconds": time.monotonic() - started,
        }


class DescribePayload(base.Payload):
    """The environment to ask."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(10.0, gt=0, le=600, description="Time limit.")


class Describe(base.Operation):
    """Asks `/metadata` and `/schema`."""

    name = "describe"
    summary = "Return an environment's own description."
    Payload = DescribePayload

    @staticmethod
    def run(payload: DescribePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"name", "address", "metadata", "schema"}`."""
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
        return {
            "name": payload.name,
            "address": without_token(base_url)[0],
            "metadata": ask(base_url, "/metadata", payload.timeout_seconds),
            "schema": ask(base_url, "/schema", payload.timeout_seconds),
        }
