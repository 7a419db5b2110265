# SPDX-License-Identifier: Apache-2.0
"""`probe`: an environment answers; `describe`: its metadata and schemas."""

from __future__ import annotations

import time

from pydantic import Field

from ...environments.access import ask, base_url_by_name
from ...schema.layout import Layout
from ...system.net.access import without_token
from ...system.text.json_lines import Json
from . import base


class AskPayload(base.Payload):
    """The environment to ask."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(10.0, gt=0, le=600, description="Time limit.")


class Probe(base.Operation):
    """Asks `/health` once."""

    name = "probe"
    summary = "Check whether an environment answers, and how quickly."
    Payload = AskPayload

    @staticmethod
    def run(payload: AskPayload, context: base.OperationContext) -> Json:
        """`{"name", "address", "health", "seconds"}`: connecting included."""
        return _ask(payload, context, "health")


class Describe(base.Operation):
    """Asks `/metadata` and `/schema`."""

    name = "describe"
    summary = "Return an environment's own description."
    Payload = AskPayload

    @staticmethod
    def run(payload: AskPayload, context: base.OperationContext) -> Json:
        """`{"name", "address", "metadata", "schema", "seconds"}`."""
        return _ask(payload, context, "metadata", "schema")


def _ask(payload: AskPayload, context: base.OperationContext, *pages: str) -> Json:
    base_url = base_url_by_name(Layout(context.home).runs, payload.name)
    started = time.monotonic()
    found: Json = {page: ask(base_url, f"/{page}", payload.timeout_seconds) for page in pages}
    found["seconds"] = time.monotonic() - started
    return {"name": payload.name, "address": without_token(base_url)[0], **found}
