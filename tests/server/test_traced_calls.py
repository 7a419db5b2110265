# SPDX-License-Identifier: Apache-2.0
"""The spans of calls, and the trace that they continue."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from openenvd.server.api.traced_calls import TracedCalls
from openenvd.server.dispatch.request_traces import CALL
from openenvd.tracing.context import TraceContext

from ..tracing.kept_spans import KeptSpans, attributes_of, ids_of

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    spans = KeptSpans()
    yield spans
    spans.tracer.stop()


@pytest.fixture
def client(kept: KeptSpans) -> httpx.AsyncClient:
    """A client of an application with routes as the daemon's are."""
    router = APIRouter()

    @router.post("/requests/{request_id}/cancel")
    async def cancel(request_id: str) -> str | None:
        call = CALL.get(None)
        return None if call is None or call.span is None else call.span.context.span_id

    @router.get("/requests")
    async def requests() -> bool:
        return CALL.get(None) is None

    @router.post("/fail")
    async def fail() -> JSONResponse:
        return JSONResponse({}, 503)

    app = FastAPI()
    app.include_router(router, prefix="/v1")
    app.add_middleware(TracedCalls, tracer=kept.tracer)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://daemon")


async def test_a_call_continues_the_clients_trace(
    client: httpx.AsyncClient, kept: KeptSpans
) -> None:
    answer = await client.post("/v1/requests/7f3a/cancel", headers={"traceparent": str(PARENT)})
    [span] = kept.all
    assert ids_of(span) == (PARENT.trace_id, answer.json(), PARENT.span_id)
    assert (span.name, span.kind.name) == ("POST /v1/requests/{request_id}/cancel", "SERVER")
    told = attributes_of(span)
    assert told["http.route"] == "/v1/requests/{request_id}/cancel"
    assert told["url.path"] == "/v1/requests/7f3a/cancel"
    assert told["http.response.status_code"] == 200
    assert span.status.description is None


async def test_a_call_without_a_trace_begins_one(
    client: httpx.AsyncClient, kept: KeptSpans
) -> None:
    await client.post("/v1/requests/7f3a/cancel", headers={"traceparent": "nonsense"})
    assert ids_of(kept.all[0])[2] is None


async def test_a_call_that_asks_is_not_traced(client: httpx.AsyncClient, kept: KeptSpans) -> None:
    assert (await client.get("/v1/requests")).json() is True
    assert kept.all == []


async def test_a_call_that_the_daemon_fails_is_failed(
    client: httpx.AsyncClient, kept: KeptSpans
) -> None:
    await client.post("/v1/fail")
    assert attributes_of(kept.all[0])["error.type"] == "503"
    assert not kept.all[0].status.is_ok
