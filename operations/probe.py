# SPDX-License-Identifier: Apache-2.0
"""`probe`: whether an environment answers, and how quickly; also whether it begins a session."""

from __future__ import annotations

import json
import time
from typing import Any

from pydantic import Field

from ..environments.errors import NotAnswering
from ..environments.http_get import ask, base_url_by_name
from ..environments.layout import Layout
from ..system.access_tokens import bearer_header, without_token
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
        """`{"name", "address", "health", "seconds", "session_seconds"}`: connecting included.

        Raises:
            NotAnswering
        """
        base_url = base_url_by_name(Layout(context.home).runs, payload.name)
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


def _begin_session(base_url: str, timeout_seconds: float, hint: str) -> float:
    """Reset a session, and end it; how many seconds that took.

    Raises:
        NotAnswering
    """
    from websockets.exceptions import WebSocketException  # of few workers
    from websockets.sync.client import connect

    from ..rollouts.sessions.session import session_url

    address, token = without_token(base_url)
    started = time.monotonic()
    try:
        with connect(
            session_url(address),
            additional_headers=bearer_header(token),
            open_timeout=timeout_seconds,
            close_timeout=timeout_seconds,
            proxy=None,
        ) as session:
            session.send(json.dumps({"type": "reset", "data": {}}))
            answer = json.loads(session.recv(timeout_seconds))
    except (OSError, WebSocketException, ValueError) as exc:  # a `TimeoutError` is an `OSError`
        why = str(exc) or type(exc).__name__
        raise NotAnswering(f"no session at {address}: {why}", hint) from exc
    if answer.get("type") != "observation":
        why = (answer.get("data") or {}).get("message") or answer
        raise NotAnswering(f"a reset at {address} is answered by an error: {why}", hint)
    return time.monotonic() - started
