# SPDX-License-Identifier: Apache-2.0
"""What the API refuses before anything is written, through the real application."""

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from openenvd.server.api.app import create_app
from openenvd.server.api.dependencies import Dependencies
from openenvd.server.api.security import BrowserSessions, Guard
from openenvd.server.api.streams import Position
from openenvd.server.dispatch.request_traces import RequestTraces
from openenvd.system.process.loop_lag import EventLoopLagMonitor

TOKEN = "a-token"
LAUNCH = '{"operation": "launch", "payload": {"source": "echo"%s}%s}'


async def answer(body: str | bytes, path: str = "/v1/requests") -> tuple[int, dict[str, Any]]:
    deps = cast(
        Dependencies,
        SimpleNamespace(
            identity={"version": "1"},
            lag=EventLoopLagMonitor(),
            submitter=SimpleNamespace(traces=RequestTraces()),
        ),
    )
    transport = httpx.ASGITransport(Guard(create_app(deps), TOKEN, BrowserSessions(TOKEN)))
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        if body:
            response = await client.post(path, content=body, headers=headers)
        else:
            response = await client.get(path, headers=headers)
    error: dict[str, Any] = response.json()["error"]
    return response.status_code, error


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ("{", None, "the body is not JSON"),
        ("null", "", "body: Input should be a valid dictionary"),
        ("{}", "operation", "operation: is missing"),
        (LAUNCH % (', "bogus": 1', ""), "bogus", "launch has no option 'bogus'"),
        (LAUNCH % ("", ', "bogus": 1'), "bogus", "bogus: Extra inputs"),
        (LAUNCH % (', "memory": 1', ""), "memory", "launch has no option 'memory'"),
        (LAUNCH % (', "env": {"A": "\\ud800"}', ""), "", "not Unicode"),
        (LAUNCH % (', "env": {"A": 1}', ""), "env.A", "env.A: Input should be a valid string"),
        (LAUNCH % ("", ', "timeout_seconds": 1e308'), "timeout_seconds", "less than or equal"),
        (LAUNCH % ("", ', "timeout_seconds": Infinity'), "timeout_seconds", "less than or equal"),
        (LAUNCH % (', "ready_timeout_seconds": 1e400', ""), "ready_timeout_seconds", "less than"),
        (LAUNCH % (', "max_sessions": 1000000000000000000000', ""), "max_sessions", "less than"),
        (LAUNCH % (', "memory_mb": 1000000000000000000000', ""), "memory_mb", "less than"),
        (LAUNCH % (f', "cwd": "/{"x" * 5000}"', ""), "cwd", "at most 4096"),
    ],
)
async def test_a_body_that_cannot_be_right_is_refused_by_field(
    body: str, field: str | None, message: str
) -> None:
    status, error = await answer(body)
    assert (status, error["kind"], error.get("field")) == (422, "invalid", field)
    assert message in error["message"]


async def test_an_unknown_operation_or_query_is_refused_by_name() -> None:
    status, error = await answer('{"operation": "lanch", "payload": {}}')
    assert status == 422
    assert error["message"] == "there is no operation 'lanch'"
    assert (error["near"], error["hint"]) == (["launch"], "did you mean launch?")
    status, error = await answer("", "/v1/requests?state=bogus")
    assert (status, error["field"]) == (422, "state.0")


@pytest.mark.parametrize("path", ["/v1/requests/", "/v1/environments/", "/v1/environments//logs"])
async def test_an_empty_name_is_not_found(path: str) -> None:
    status, error = await answer("", path)
    assert (status, error["kind"]) == (404, "not_found")


@pytest.mark.parametrize(
    "sent",
    [None, "", "x", "1", "1:", ":1", "-1:0", "-1:-1", "1:2:3", f"{10**20}:0", f"0:{10**20}"],
)
def test_a_last_event_id_that_is_not_ours_means_the_beginning(sent: str | None) -> None:
    assert Position.parse(sent) == Position(0, 0)
