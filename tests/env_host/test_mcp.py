# SPDX-License-Identifier: Apache-2.0
"""MCP as its specification has it, beside upstream's dialect: over HTTP, `/mcp` and `/ws`.

The official SDK's client and FastMCP's use a real environment with tools where their packages are:
`OPENENVD_UPSTREAM_PYTHON` names an interpreter that has upstream's (which needs both), and
`OPENENVD_MCP_PYTHON` one that has their newest versions.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.env_host.protocol import HostConfig

from .conformance_project import write_project
from .conftest import StartHost
from .hosts import WAIT_SECONDS, Host
from .samples import TOOLS

PYTHON_VARIABLE = "OPENENVD_UPSTREAM_PYTHON"
CLIENT_VARIABLE = "OPENENVD_MCP_PYTHON"
NEWEST = "2025-11-25"


class McpClient:
    """One client of the Streamable HTTP transport, with a connection for each request."""

    def __init__(self, host: Host) -> None:
        self._port = host.port
        self.headers = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
        }

    def request(self, verb: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_SECONDS)
        text = None if body is None else json.dumps(body)
        connection.request(verb, "/mcp", text, self.headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, json.loads(data) if data else None

    def ask(self, method: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        status, _, answer = self.request("POST", body)
        assert status == 200, answer
        assert answer["id"] == 1
        return answer["result"]

    def initialize(self, version: str = NEWEST) -> Any:
        params = {
            "protocolVersion": version,
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        }
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        status, headers, answer = self.request("POST", body)
        assert status == 200, answer
        self.headers["mcp-session-id"] = headers["mcp-session-id"]
        self.headers["mcp-protocol-version"] = answer["result"]["protocolVersion"]
        return answer["result"]

    def notify(self, method: str) -> int:
        status, _, body = self.request("POST", {"jsonrpc": "2.0", "method": method})
        assert body is None
        return status


@pytest.fixture
def serve(start: StartHost, tmp_path: Path) -> Callable[..., Host]:
    (tmp_path / "tools.py").write_text(TOOLS)

    def start_tools(name: str = "Tools", **config: Any) -> Host:
        started = start(f"tools:{name}", **config)
        started.ready()
        return started

    return start_tools


@pytest.mark.parametrize("config", [{"shards": 3, "max_sessions": 9}, {"isolate": True}])
def test_clients_that_initialize_get_sessions_in_any_process(
    serve: Callable[..., Host], config: dict[str, Any]
) -> None:
    host = serve(manifest={"version": "2.1"}, **config)
    clients = [McpClient(host) for _ in range(4)]
    for client in clients:
        answer = client.initialize()
        assert answer["protocolVersion"] == NEWEST
        assert answer["capabilities"] == {"tools": {"listChanged": False}}
        assert answer["serverInfo"] == {"name": "sample", "version": "2.1"}
        assert client.notify("notifications/initialized") == 202
        assert client.ask("ping") == {}
    for expected in (1, 2):
        for client in clients:
            result = client.ask("tools/call", name="count", arguments={})
            assert result["structuredContent"] == {"count": expected}
    assert host.http("GET", "/capacity")[1]["sessions"] == 4
    for client in clients:
        assert client.request("DELETE")[0] == 200
        assert client.request("DELETE")[0] == 404
        status, _, answer = client.request("POST", {"jsonrpc": "2.0", "id": 3, "method": "ping"})
        assert (status, answer["id"]) == (404, 3)
        assert client.request("POST", {"jsonrpc": "2.0", "method": "notifications/x"})[0] == 404
    host.emptied()


def test_tools_and_results_have_the_forms_of_the_specification(
    serve: Callable[..., Host],
) -> None:
    client = McpClient(serve())
    client.initialize()
    tools = {tool["name"]: tool for tool in client.ask("tools/list")["tools"]}
    assert tools["greet"]["inputSchema"] == {"type": "object"}
    assert client.ask("tools/call", name="greet", arguments={"name": "you"}) == {
        "content": [{"type": "text", "text": "hello you"}],
        "isError": False,
    }
    assert client.ask("tools/call", name="fail", arguments={}) == {
        "content": [{"type": "text", "text": "as asked"}],
        "isError": True,
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "nobody"}}
    assert client.request("POST", body)[2]["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("asked", "given"),
    [("2024-11-05", "2024-11-05"), ("2025-06-18", "2025-06-18"), ("2026-07-28", NEWEST)],
)
def test_the_version_that_was_asked_for_is_agreed_on_if_it_is_known(
    serve: Callable[..., Host], asked: str, given: str
) -> None:
    client = McpClient(serve())
    assert client.initialize(asked)["protocolVersion"] == given


def test_what_the_transport_forbids_is_refused(serve: Callable[..., Host]) -> None:
    client = McpClient(serve())
    client.initialize()
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    client.headers["mcp-protocol-version"] = "1999-01-01"
    assert client.request("POST", ping)[0] == 400
    client.headers["mcp-protocol-version"] = NEWEST
    client.headers["accept"] = "text/event-stream"
    assert client.request("POST", ping)[0] == 406
    assert client.request("GET")[0] == 405
    del client.headers["mcp-session-id"]
    assert client.request("DELETE")[0] == 405


def test_an_environment_without_tools_says_so(serve: Callable[..., Host]) -> None:
    assert McpClient(serve("Plain")).initialize()["capabilities"] == {}


def test_upstreams_dialect_is_answered_as_ever(serve: Callable[..., Host]) -> None:
    client = McpClient(serve())
    session = client.ask("openenv/session/create")["session_id"]
    arguments = {"session_id": session, "name": "count", "arguments": {}}
    assert client.ask("tools/call", **arguments) == {"count": 1}
    assert client.ask("tools/call", **arguments) == {"count": 2}
    assert client.ask("tools/list", session_id=session)["tools"][0]["inputSchema"] == {}
    assert client.ask("openenv/session/close", session_id=session)["closed"]


def test_the_handshake_works_on_both_websockets(serve: Callable[..., Host]) -> None:
    host = serve()
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "count"}}
    with host.open("/mcp") as client:
        assert client.say(json.dumps(hello))["result"]["protocolVersion"] == NEWEST
        client.connection.send(json.dumps(ready))
        assert client.say(json.dumps(call))["result"]["structuredContent"] == {"count": 1}
    with host.open("/ws") as client:
        assert client.ask("mcp", call)["data"]["result"] == {"count": 1}
        assert client.ask("mcp", hello)["data"]["result"]["protocolVersion"] == NEWEST
        client.send("mcp", ready)
        assert client.ask("mcp", call)["data"]["result"]["structuredContent"] == {"count": 2}
        assert client.ask("reset")["type"] == "observation"


CLIENTS = '''
import asyncio, contextlib, json, sys
import anyio
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from fastmcp import Client
from websockets.asyncio.client import connect

def plain(result):
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)

async def use(session):
    assert plain(await session.initialize())["serverInfo"]["name"] == "tools"
    await session.send_ping()
    tools = {tool["name"]: tool for tool in plain(await session.list_tools())["tools"]}
    assert tools["add"]["inputSchema"]["required"] == ["a", "b"], tools
    result = plain(await session.call_tool("add", {"a": 1, "b": 2}))
    assert result["structuredContent"] == {"result": 3}, result
    assert result["content"][0]["text"] == "3" and not result["isError"], result
    result = plain(await session.call_tool("fail", {}))
    assert result["isError"] and "as asked" in result["content"][0]["text"], result

@contextlib.asynccontextmanager
async def within_ws(url):
    """The messages of MCP in those of /ws."""
    try:
        from mcp_types import jsonrpc_message_adapter as adapter
        parse, dump = adapter.validate_python, lambda m: adapter.dump_python(
            m, mode="json", by_alias=True, exclude_unset=True)
    except ImportError:  # before the SDK's 2.0
        from mcp.types import JSONRPCMessage
        parse, dump = JSONRPCMessage.model_validate, lambda m: m.model_dump(
            mode="json", by_alias=True, exclude_none=True)
    send, read = anyio.create_memory_object_stream(0)
    write, receive = anyio.create_memory_object_stream(0)
    async with connect(url) as socket, anyio.create_task_group() as tasks:
        async def reading():
            async for text in socket:
                await send.send(SessionMessage(parse(json.loads(text)["data"])))
        async def writing():
            async for message in receive:
                data = dump(message.message)
                await socket.send(json.dumps({"type": "mcp", "data": data}))
        tasks.start_soon(reading)
        tasks.start_soon(writing)
        yield read, write
        tasks.cancel_scope.cancel()

async def main(port):
    url = f"http://127.0.0.1:{port}/mcp"
    async with streamable_http_client(url) as streams:
        async with ClientSession(*streams[:2]) as session:
            await use(session)
    async with within_ws(f"ws://127.0.0.1:{port}/ws") as streams:
        async with ClientSession(*streams) as session:
            await use(session)
    with contextlib.suppress(ImportError):  # the SDK's 2.0 has it no more
        from mcp.client.websocket import websocket_client
        async with websocket_client(f"ws://127.0.0.1:{port}/mcp") as streams:
            async with ClientSession(*streams) as session:
                await use(session)
    async with Client(url) as client:
        assert {tool.name for tool in await client.list_tools()} >= {"add", "fail"}
        assert (await client.call_tool("add", {"a": 2, "b": 3})).data == 5
    with contextlib.suppress(ImportError):  # since its 2.0; it probes for newer versions first
        from mcp import Client as SdkClient
        async with SdkClient(url) as client:
            assert plain(await client.call_tool("add", {"a": 1, "b": 1}))["content"]

asyncio.run(main(sys.argv[1]))
print("tools were called")
'''


@pytest.mark.upstream
@pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE),
    reason=f"{PYTHON_VARIABLE} names no interpreter that has upstream's openenv package",
)
@pytest.mark.parametrize("variable", [PYTHON_VARIABLE, CLIENT_VARIABLE])
def test_the_official_clients_call_the_tools_of_a_real_environment(
    tmp_path: Path, variable: str
) -> None:
    write_project(tmp_path)
    config = HostConfig(
        "tools", import_paths=(str(tmp_path),), app_candidates=("tools_app:app",), shards=2
    )
    host = Host(config, tmp_path, python=os.environ[PYTHON_VARIABLE])
    try:
        host.ready()
        done = subprocess.run(
            [os.environ[variable], "-c", CLIENTS, str(host.port)],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert "tools were called" in done.stdout, done.stdout + done.stderr
        host.emptied()
        assert host.stop() == 0
    finally:
        host.close()
