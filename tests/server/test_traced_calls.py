# SPDX-License-Identifier: Apache-2.0
"""The spans of calls, and the trace that they continue."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from opentelemetry.trace import get_current_span

from openenvd.server.api.app import create_app
from openenvd.server.api.dependencies import Dependencies
from openenvd.server.api.security import BrowserSessions, Guard
from openenvd.server.dispatch.request_traces import RequestTraces
from openenvd.server.errors import NotFound
from openenvd.system.process.loop_lag import EventLoopLagMonitor

from .tracing.conftest import KeptSpans, attributes_of, ids_of

TOKEN = "a-token"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANCEL = "/v1/requests/7f3a/cancel"


class Submitter:
    def __init__(self, traces: RequestTraces) -> None:
        self.traces = traces
        self.span_ids: list[str] = []

    async def cancel(self, request_id: str) -> None:
        self.span_ids.append(f"{get_current_span().get_span_context().span_id:016x}")
        if request_id == "defect":
            raise RuntimeError("hunter22")
        raise NotFound("no such request")


@pytest.fixture
def submitter(kept: KeptSpans) -> Submitter:
    return Submitter(RequestTraces(kept.provider))


@pytest.fixture
def client(submitter: Submitter) -> httpx.AsyncClient:
    """A client of the daemon's application, whose submitter does nothing."""
    parts: dict[str, Any] = {"identity": {"version": "1"}, "lag": EventLoopLagMonitor()}
    parts["submitter"] = submitter
    app = create_app(cast(Dependencies, SimpleNamespace(**parts)))
    guarded = Guard(app, TOKEN, BrowserSessions(TOKEN))
    transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_a_call_continues_the_clients_trace(
    client: httpx.AsyncClient, kept: KeptSpans, submitter: Submitter
) -> None:
    headers = AUTHORIZED | {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    await client.post(CANCEL, headers=headers)
    [span] = kept.all
    assert ids_of(span) == (TRACE, submitter.span_ids[0], SPAN)
    assert (span.name, span.kind.name) == ("POST /v1/requests/{request_id}/cancel", "SERVER")
    told = attributes_of(span)
    assert told["http.route"] == "/v1/requests/{request_id}/cancel"
    assert told["url.path"] == CANCEL
    assert told["http.response.status_code"] == 404
    assert span.status.description is None
    assert TOKEN not in str(span.to_json())


async def test_calls_that_ask_are_not_traced(client: httpx.AsyncClient, kept: KeptSpans) -> None:
    assert (await client.get("/v1/nothing", headers=AUTHORIZED)).status_code == 404
    assert (await client.post(CANCEL)).status_code == 401
    assert kept.all == []
    await client.post(CANCEL, headers=AUTHORIZED | {"traceparent": "nonsense"})
    assert ids_of(kept.all[0])[2] is None


async def test_a_call_that_the_daemon_fails_is_failed_without_its_message(
    client: httpx.AsyncClient, kept: KeptSpans
) -> None:
    await client.post("/v1/requests/defect/cancel", headers=AUTHORIZED)
    [span] = kept.all
    assert attributes_of(span)["error.type"] == "RuntimeError"
    assert not span.status.is_ok
    assert "hunter22" not in span.to_json()
