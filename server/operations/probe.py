# SPDX-License-Identifier: Apache-2.0
"""`probe`: an environment answers, and begins a session; `describe`: its metadata and schemas."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from ...environments.access import ask, base_url_by_name
from ...schema.errors import NotAnswering
from ...schema.layout import Layout
from ...system.net.access import without_token
from . import base


class ProbePayload(base.Payload):
    """The environment to ask."""

    name: str = Field(min_length=1, description="The environment's name.")
    timeout_seconds: float = Field(5.0, gt=0, le=600, description="Time limit.")
    session: bool = Field(False, description="Whether to begin a session, too, and to reset it.")


class Probe(base.Operation):
    """Asks `/health` once; begins a session if asked to."""

    name = "probe"
    summary = "Check whether an environment answers, and how quickly."
    Payload = ProbePayload

    @staticmethod
    def run(payload: ProbePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"name", "address", "health", "seconds", "session_seconds"}`: connecting included."""
        base_url = base_url_by_name(
            Layout(context.home).runs, payload.name, for_sessions=payload.session
        )
        started = time.monotonic()
        health = ask(base_url, "/health", payload.timeout_seconds)
        seconds = time.monotonic() - started
        session_seconds = None
        if payload.session:
            hint = f"openenv logs {payload.name} shows what it printed"
            session_seconds = _begin_session(base_url, payload.timeout_seconds, hint)
        return {
            "name": payload.name,
            "address": without_token(base_url)[0],
            "health": health,
            "seconds": seconds,
            "session_seconds": session_seconds,
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


def _begin_session(base_url: str, timeout_seconds: float, hint: str) -> float:
    """Reset a session, and end it; return how many seconds that took."""
    from ...rollouts.session.loop_thread import run_on_thread  # here: few workers need it
    from .testing.subject import Frame, SessionFailed, TrialSession

    async def reset() -> Frame:
        async with TrialSession(base_url, timeout_seconds, timeout_seconds) as session:
            return await session.reset()

    started = time.monotonic()
    address, _ = without_token(base_url)
    try:
        answer = run_on_thread(reset())
    except SessionFailed as exc:
        raise NotAnswering(f"no session at {address}: {exc}", hint) from exc
    if answer.kind != "observation":
        why = answer.data.get("message") or answer.kind
        raise NotAnswering(f"a reset at {address} is answered by an error: {why}", hint)
    return time.monotonic() - started
