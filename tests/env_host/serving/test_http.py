# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes of a bare class, and JSON-RPC on `/mcp`."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from uvicorn.config import Config

from openenvd.env_host.serving.event_driven import EventDrivenServer

from ..conftest import StartHost
from ..hosts import Json
from ..samples import TOOLS


def test_a_body_not_utf8_is_400_and_a_raising_step_500(serve: StartHost, tmp_path: Path) -> None:
    host = serve()
    assert host.http("POST", "/step", b"\xff")[0] == 422
    status, answer = host.http("POST", "/step", {"action": {"what": "raise"}})
    assert (status, answer["detail"]) == (500, "RuntimeError: the level file is missing")
    assert (tmp_path / "closed.log").read_text() == "closed\n"  # its environment was closed


@pytest.mark.parametrize(
    ("env_class", "manifest", "name", "description"),
    [
        ("Plain", {"name": "plain", "description": "Plain."}, "plain", "Plain."),
        ("plain:Bare", {}, "Bare", "Bare environment"),
    ],
)
def test_metadata_of_a_class_that_has_none_is_its_name_or_the_manifests(
    serve: StartHost, env_class: str, manifest: Json, name: str, description: str
) -> None:
    host = serve(env_class, manifest=manifest)
    answer = host.http("GET", "/metadata")[1]
    assert (answer["name"], answer["description"]) == (name, description)
    assert host.stop() == 0
    assert host.log.read_text() == ""


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
def test_parameters_may_have_any_name(serve: StartHost, kind: str) -> None:
    host = serve(f"named:{kind}", files={"named.py": NAMED})
    names = ("method", "is_async", "call", "function")
    given = {name: name for name in (*names, "self", "cls", "args")} | {"this": "the instance"}
    more = ["args", "cls", "self"]
    status, answer = host.http("POST", "/reset", given)
    assert (status, answer["observation"]["text"]) == (200, f"{' '.join(names)} {more}")
    status, answer = host.http("POST", "/step", {"action": {}, **given})
    more = sorted([*more, "call", "function", "is_async"])
    assert (status, answer["observation"]["text"]) == (200, f"method {more}")


def test_closing_an_attached_session_waits_for_its_websocket_to_close(serve: StartHost) -> None:
    host = serve()
    session = host.create_session()
    with host.open(f"/ws?session_id={session}") as client:
        client.ask("reset")
        assert host.rpc("openenv/session/close", session_id=session)["result"]["closing"] is True
        assert client.ask("state")["type"] == "state"
    host.note_that(sessions=1)
    host.note_that(sessions=0)


def test_a_session_without_a_websocket_ends_when_nothing_uses_it(serve: StartHost) -> None:
    host = serve(max_sessions=2, http_session_idle_seconds=0.2)
    with host.open() as client:  # not concerned, however idle
        client.ask("reset")
        session = host.create_session()
        host.until(lambda capacity: capacity["sessions"] == 1)
        assert host.rpc("tools/list", session_id=session)["error"]["code"] == -32602
        session = host.create_session()
        with host.open(f"/ws?session_id={session}") as attached:
            attached.ask("reset")
        host.until(lambda capacity: capacity["sessions"] == 1)
        assert client.ask("state")["type"] == "state"
    assert "1 session without a WebSocket ended" in host.log.read_text()


def test_an_isolated_session_begun_over_http_ends_when_nothing_uses_it(serve: StartHost) -> None:
    host = serve(isolate=True, max_sessions=1, http_session_idle_seconds=0.2)
    for _ in range(2):
        assert host.create_session()
        host.emptied()


def test_mcp_is_spoken_in_upstreams_dialect_alone(serve: StartHost) -> None:
    host = serve("tools:Tools", files={"tools.py": TOOLS}, shards=2)
    session = host.create_session()
    for count in (1, 2):
        arguments = {"session_id": session, "name": "count", "arguments": {}}
        assert host.rpc("tools/call", **arguments)["result"] == {"count": count}
    [tool, *_] = host.rpc("tools/list", session_id=session)["result"]["tools"]
    assert tool == {"name": "count", "description": "", "inputSchema": {}}
    assert host.rpc("initialize")["error"]["code"] == -32601
    assert host.rpc("notifications/initialized", session_id=session)["error"]["code"] == -32601
    assert host.http("DELETE", "/mcp")[0] == 405
    assert host.rpc("openenv/session/close", session_id=session)["result"]["closed"]


def test_mcp_over_a_websocket_has_a_session_of_its_own(serve: StartHost) -> None:
    host = serve(max_sessions=1, admission_timeout_seconds=0)
    with host.open("/mcp") as client:
        request = {"jsonrpc": "2.0", "method": "openenv/session/create", "id": 1}
        assert client.say(json.dumps(request))["result"]["session_id"]
        for text, code in (
            ("{", -32700),
            ('{"jsonrpc":"2.0","method":"x"}', -32601),
            ('{"jsonrpc":"2.0","method":"tools/list"}', -32603),
            ('"no object"', -32600),
        ):
            assert client.say(text)["error"]["code"] == code
        with host.open("/mcp") as second:
            refusal = second.receive()["error"]
        assert (refusal["code"], refusal["data"]["max_sessions"]) == (-32000, 1)
        assert client.say(b"binary")["error"]["code"] == -32000
    host.note_that(sessions=0)


async def never_called(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(scope)


async def test_it_ends_at_once_when_it_was_asked_to_before_it_began() -> None:
    server = EventDrivenServer(Config(never_called, lifespan="off", ws="none", log_config=None))
    server.request_exit()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.serve(sockets=[listener])
