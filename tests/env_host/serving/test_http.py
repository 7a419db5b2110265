# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes of a bare class, and JSON-RPC on `/mcp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from ..conftest import ECHO, StartHost
from ..hosts import Host
from ..samples import TOOLS


@pytest.fixture
def echo(start: StartHost) -> Host:
    host = start(ECHO)
    host.ready()
    return host


def rpc(host: Host, method: str, **params: Any) -> Any:
    request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
    return host.http("POST", "/mcp", request)[1]


def test_health_answers_healthy(echo: Host) -> None:
    assert echo.http("GET", "/health") == (200, {"status": "healthy"})


def test_metadata_is_the_environments_own(echo: Host) -> None:
    assert echo.http("GET", "/metadata")[1]["name"] == "echo"


def test_metadata_of_a_class_that_has_none_comes_from_the_manifest(start: StartHost) -> None:
    host = start("Plain", manifest={"name": "plain", "description": "Plain."})
    host.ready()
    answer = host.http("GET", "/metadata")[1]
    assert (answer["name"], answer["description"]) == ("plain", "Plain.")


def test_the_schema_names_the_fields_of_action_observation_and_state(echo: Host) -> None:
    schema = echo.http("GET", "/schema")[1]
    assert set(schema) == {"action", "observation", "reset_observation", "state"}
    assert "message" in schema["action"]["properties"]
    assert "echoed_message" in schema["observation"]["properties"]
    assert "step_count" in schema["state"]["properties"]


def test_each_http_request_has_an_environment_of_its_own(echo: Host) -> None:
    assert echo.http("POST", "/reset", {"seed": 1})[0] == 200
    status, answer = echo.http("POST", "/step", {"action": {"message": "ab"}})
    assert (status, answer["reward"], answer["metadata"]["step"]) == (200, 0.2, 1)
    assert echo.http("GET", "/state")[1]["step_count"] == 0


def test_reset_needs_no_body(echo: Host) -> None:
    assert echo.http("POST", "/reset")[0] == 200


NAMED = """
from samples import Counter, Seen

class Named(Counter):
    def reset(this, method="", is_async="", call="", function="", **more):
        return Seen(text=f"{method} {is_async} {call} {function} {sorted(more)}")

    def step(this, action, method="", **more):
        return Seen(text=f"{method} {sorted(more)}")

class Async(Named):
    async def reset_async(this, **arguments):
        return this.reset(**arguments)

    async def step_async(this, action, **arguments):
        return this.step(action, **arguments)
"""


@pytest.mark.parametrize("kind", ["Named", "Async"])
def test_parameters_may_have_any_name(start: StartHost, tmp_path: Path, kind: str) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    host = start(f"named:{kind}")
    host.ready()
    names = ("method", "is_async", "call", "function")
    given = {name: name for name in (*names, "self", "cls", "args")} | {"this": "the instance"}
    more = ["args", "cls", "self"]
    status, answer = host.http("POST", "/reset", given)
    assert (status, answer["observation"]["text"]) == (200, f"{' '.join(names)} {more}")
    status, answer = host.http("POST", "/step", {"action": {}, **given})
    more = sorted([*more, "call", "function", "is_async"])
    assert (status, answer["observation"]["text"]) == (200, f"method {more}")


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/step", {"action": {"m": 1}}, "missing"),
        ("/step", {}, "missing"),
        ("/step", "{", "json_invalid"),
        ("/reset", {"seed": -1}, "greater_than_equal"),
    ],
)
def test_a_bad_body_is_422_with_the_field(echo: Host, path: str, body: Any, kind: str) -> None:
    status, answer = echo.http("POST", path, body)
    assert (status, answer["detail"][0]["type"]) == (422, kind)


def test_a_step_that_raises_is_500_with_the_reason(start: StartHost) -> None:
    host = start()
    host.ready()
    status, answer = host.http("POST", "/step", {"action": {"what": "raise"}})
    assert (status, answer["detail"]) == (500, "RuntimeError: the level file is missing")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/x", 404), ("GET", "/reset", 405)])
def test_unknown_paths_and_methods_are_refused(
    echo: Host, method: str, path: str, status: int
) -> None:
    assert echo.http(method, path)[0] == status


def test_the_environment_of_a_request_is_closed(start: StartHost, tmp_path: Path) -> None:
    host = start()
    host.ready()
    host.http("POST", "/reset")
    assert (tmp_path / "closed.log").read_text() == "closed\n"


def test_a_session_begun_over_http_can_be_attached_to_and_closed(start: StartHost) -> None:
    host = start(max_sessions=1)
    host.ready()
    session = rpc(host, "openenv/session/create")["result"]["session_id"]
    host.note_that(sessions=1)
    assert rpc(host, "openenv/session/create")["error"]["data"]["max_sessions"] == 1
    for count in ("1", "2"):
        with host.open(f"/ws?session_id={session}") as client:
            answer = client.ask("step", {"what": "count"})
            assert answer["data"]["observation"]["text"] == count
            client.send("close")
            assert client.connection.close_code is None
            host_has_let_go(client.connection)
    assert rpc(host, "openenv/session/close", session_id=session)["result"]["closed"] is True
    host.emptied()


def host_has_let_go(connection: Any) -> None:
    """Wait for the server's close frame."""
    for _ in connection:
        pass


def test_an_unknown_session_is_refused(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open("/ws?session_id=nobody") as client:
        assert client.receive()["data"]["code"] == "SESSION_ERROR"
    assert rpc(host, "tools/list", session_id="nobody")["error"]["code"] == -32602


def test_closing_an_attached_session_waits_for_its_websocket_to_close(start: StartHost) -> None:
    host = start()
    host.ready()
    session = rpc(host, "openenv/session/create")["result"]["session_id"]
    with host.open(f"/ws?session_id={session}") as client:
        client.ask("reset")
        assert rpc(host, "openenv/session/close", session_id=session)["result"]["closing"] is True
        assert client.ask("state")["type"] == "state"
    host.note_that(sessions=1)
    host.note_that(sessions=0)


def test_a_session_without_a_websocket_ends_when_nothing_uses_it(start: StartHost) -> None:
    host = start(max_sessions=2, http_session_idle_seconds=0.2)
    host.ready()
    with host.open() as client:  # not concerned, however idle
        client.ask("reset")
        session = rpc(host, "openenv/session/create")["result"]["session_id"]
        host.until(lambda capacity: capacity["sessions"] == 1)
        assert rpc(host, "tools/list", session_id=session)["error"]["code"] == -32602
        session = rpc(host, "openenv/session/create")["result"]["session_id"]
        with host.open(f"/ws?session_id={session}") as attached:
            attached.ask("reset")
        host.until(lambda capacity: capacity["sessions"] == 1)
        assert client.ask("state")["type"] == "state"
    assert "1 sessions without a WebSocket ended" in host.log.read_text()


def test_an_isolated_session_begun_over_http_ends_when_nothing_uses_it(start: StartHost) -> None:
    host = start(isolate=True, max_sessions=1, http_session_idle_seconds=0.2)
    host.ready()
    for _ in range(2):
        assert rpc(host, "openenv/session/create")["result"]["session_id"]
        host.emptied()


def test_mcp_is_spoken_in_upstreams_dialect_alone(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    host = start("tools:Tools", shards=2)
    host.ready()
    session = rpc(host, "openenv/session/create")["result"]["session_id"]
    for count in (1, 2):
        arguments = {"session_id": session, "name": "count", "arguments": {}}
        assert rpc(host, "tools/call", **arguments)["result"] == {"count": count}
    [tool, *_] = rpc(host, "tools/list", session_id=session)["result"]["tools"]
    assert tool == {"name": "count", "description": "", "inputSchema": {}}
    assert rpc(host, "initialize")["error"]["code"] == -32601
    assert rpc(host, "notifications/initialized", session_id=session)["error"]["code"] == -32601
    assert host.http("DELETE", "/mcp")[0] == 405
    assert rpc(host, "openenv/session/close", session_id=session)["result"]["closed"]


def test_mcp_over_a_websocket_has_a_session_of_its_own(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open("/mcp") as client:
        request = {"jsonrpc": "2.0", "method": "openenv/session/create", "id": 1}
        assert client.say(json.dumps(request))["result"]["session_id"]
        assert client.say("{")["error"]["code"] == -32700
        assert client.say('{"jsonrpc":"2.0","method":"x"}')["error"]["code"] == -32601
        assert client.say('{"jsonrpc":"2.0","method":"tools/list"}')["error"]["code"] == -32603


def test_mcp_over_a_websocket_ends_with_an_error_of_json_rpc(start: StartHost) -> None:
    host = start(max_sessions=1, admission_timeout_seconds=0)
    host.ready()
    with host.open("/mcp") as client:
        assert client.say('"no object"')["error"]["code"] == -32600
        with host.open("/mcp") as second:
            refusal = second.receive()["error"]
        assert (refusal["code"], refusal["data"]["max_sessions"]) == (-32000, 1)
        client.connection.send(b"binary")
        assert client.receive()["error"]["code"] == -32000
    host.note_that(sessions=0)


def test_a_body_that_is_not_utf8_is_the_clients_error(start: StartHost) -> None:
    host = start()
    host.ready()
    request = Request(
        f"http://127.0.0.1:{host.port}/step",
        data=b"\xff",
        headers={"content-type": "application/json"},
    )
    with pytest.raises(HTTPError) as refused:
        urlopen(request)
    assert refused.value.code == 422
    refused.value.close()
