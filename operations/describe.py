# SPDX-License-Identifier: Apache-2.0
"""`describe`: what an environment says about itself: its metadata and its schemas."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..environments.http_get import ask, base_url_by_name
from ..environments.layout import Layout
from ..system.access_tokens import without_token
from . import base


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
        """`{"name", "address", "metadata", "schema"}`.

        Raises:
            NotAnswering
        """
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
        return {
            "name": payload.name,
            "address": without_token(base_url)[0],
            "metadata": ask(base_url, "/metadata", payload.timeout_seconds),
            "schema": ask(base_url, "/schema", payload.timeout_seconds),
        }
