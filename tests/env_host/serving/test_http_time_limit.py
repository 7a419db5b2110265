# SPDX-License-Identifier: Apache-2.0
"""Calls of one HTTP request that hang: answered in time, and their slots are free again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..conftest import StartHost
from ..hosts import Host, until
from ..sessions.test_sessions import Gate

SLOTS = 2
LIMITS: dict[str, Any] = {"step_timeout_seconds": 0.2, "env": {"ONE_SHOT": str(SLOTS)}}
LIST_TOOLS = {"jsonrpc": "2.0", "method": "tools/list", "id": 7}


def step(host: Host, what: str, gate: str = "") -> tuple[int, Any]:
    return host.http("POST", "/step", {"action": {"what": what, "gate": gate}})


def test_steps_that_hang_are_answered_and_do_not_keep_others_out(
    serve: StartHost, tmp_path: Path
) -> None:
    """The environment of each is closed after it."""
    host = serve(**LIMITS)
    gates = [Gate(tmp_path, f"gate{number}") for number in range(SLOTS + 1)]
    for gate in gates:
        status, answer = step(host, "wait", gate.name)
        assert status == 504
        assert "The step did not finish within 0.2 s" in answer["detail"]
        assert "--step-timeout" in answer["detail"]
    closed = tmp_path / "closed.log"
    assert not closed.exists()
    assert step(host, "count")[0] == 200
    assert host.http("GET", "/state")[0] == 200
    before = closed.stat().st_size
    gates[0].reached()
    gates[0].open()
    until(lambda: closed.stat().st_size > before)
    assert "The step timed out after 0.2 s" in host.log.read_text()


def test_an_asynchronous_step_that_hangs_is_cancelled(serve: StartHost, tmp_path: Path) -> None:
    host = serve("Async", **LIMITS)
    for number in range(SLOTS + 1):
        cancelled = tmp_path / f"cancelled{number}"
        assert step(host, "forever", str(cancelled))[0] == 504
        until(cancelled.exists)
    assert step(host, "count")[0] == 200


def test_tools_that_hang_are_answered_with_an_error_of_json_rpc(serve: StartHost) -> None:
    host = serve("SlowTools", **LIMITS)
    for _ in range(SLOTS + 1):
        status, answer = host.http("POST", "/mcp", LIST_TOOLS)
        assert (status, answer["id"], answer["error"]["code"]) == (200, 7, -32000)
        assert "tools/list did not finish within 0.2 s" in answer["error"]["message"]
    assert step(host, "count")[0] == 200


def test_a_session_whose_tools_hang_ends(serve: StartHost) -> None:
    host = serve("SlowTools", **LIMITS)
    session_id = host.create_session()
    request = {**LIST_TOOLS, "params": {"session_id": session_id}}
    _, answer = host.http("POST", "/mcp", request)
    assert (answer["id"], answer["error"]["code"]) == (7, -32000)
    assert "tools/list did not finish within 0.2 s" in answer["error"]["message"]
    host.emptied()
    assert "Unknown session_id" in host.http("POST", "/mcp", request)[1]["error"]["message"]


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_websocket_session_whose_tools_hang_ends(serve: StartHost, is_attached: bool) -> None:
    host = serve("SlowTools", **LIMITS)
    path = "/ws"
    if is_attached:
        path += f"?session_id={host.create_session()}"
    with host.open(path) as client:
        answer = client.ask("mcp", LIST_TOOLS)
        assert answer["data"]["code"] == "SESSION_ERROR"
        assert "tools/list did not finish within 0.2 s" in answer["data"]["message"]
        host.emptied()


@pytest.mark.parametrize("what", ["cancel", "exit"])
def test_a_step_that_ends_itself_over_http_is_an_error_of_its_own(
    serve: StartHost, what: str
) -> None:
    host = serve("Async")
    for _ in range(2):
        assert step(host, what)[0] == 500
    assert step(host, "count")[0] == 200
