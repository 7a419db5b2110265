# SPDX-License-Identifier: Apache-2.0
"""HTTP MCP sessions with several shards: every request reaches the shard that has its session."""

import asyncio
import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.env_host.errors import SessionError
from openenvd.env_host.serving.mcp import Peers, body_of

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..samples import TOOLS

Json = dict[str, Any]
JSON = {"content-type": "application/json"}

PROCESS_TOOLS = """
import os

class ProcessServer(Server):
    def functions(self):
        def count():
            self.count += 1
            return {"count": self.count, "pid": os.getpid()}
        def length(text):
            return len(text)
        def die():
            os._exit(5)
        return count, length, die

class ProcessTools(Bare):
    def __init__(self):
        self.mcp_server = ProcessServer()
"""


@pytest.fixture
def host(serve: StartHost, tmp_path: Path) -> Callable[..., Host]:
    """Starts a host of `ProcessTools`."""
    (tmp_path / "tools.py").write_text(TOOLS + PROCESS_TOOLS)

    def start_tools(**config: Any) -> Host:
        return serve("tools:ProcessTools", **config)

    return start_tools


def call(host: Host, session_id: str, name: str, **arguments: Any) -> Json:
    return host.rpc("tools/call", session_id=session_id, name=name, arguments=arguments)


@pytest.mark.parametrize("query", ["", "?session_id={}"])
@pytest.mark.parametrize("config", [{"shards": 3}, {"isolate": True}], ids=["shared", "isolated"])
def test_one_connection_may_carry_requests_for_many_sessions(
    host: Callable[..., Host], config: Json, query: str
) -> None:
    served = host(max_sessions=9, **config)
    ids = [served.create_session() for _ in range(9)]
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
    pids = set()
    for session_id in ids:
        params = {"session_id": session_id, "name": "count", "arguments": {}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        connection.request("POST", f"/mcp{query.format(session_id)}", json.dumps(body), JSON)
        result = json.loads(connection.getresponse().read())["result"]
        assert result["count"] == 1
        pids.add(result["pid"])
    connection.close()
    assert len(pids) == config.get("shards", len(ids))


def test_large_requests_reach_other_shards_and_no_exited_one(host: Callable[..., Host]) -> None:
    served = host(shards=2, max_sessions=20)
    text = "x" * (3 << 20)
    for session_id in [served.create_session() for _ in range(4)]:
        for _ in range(2):
            assert call(served, session_id, "length", text=text)["result"] == len(text)
    session_id = served.create_session()
    os.kill(call(served, session_id, "count")["result"]["pid"], signal.SIGKILL)
    while "shard_exit" not in (served.note() or pytest.fail("no shard_exit")):
        pass
    answers = [call(served, session_id, "count") for _ in range(6)]
    assert all("Unknown session_id" in answer["error"]["message"] for answer in answers)


def test_a_session_is_created_where_there_is_room(host: Callable[..., Host]) -> None:
    served = host(shards=4, max_sessions=4)
    ids = [served.create_session() for _ in range(4)]
    pids = Counter(call(served, i, "count")["result"]["pid"] for i in ids)
    assert set(pids.values()) == {1}
    error = served.rpc("openenv/session/create")["error"]
    assert "All sessions are in use: 4 of 4" in error["message"]


def test_a_shard_that_exits_before_it_has_answered_is_reported() -> None:
    async def ask() -> None:
        async def no_other() -> None:
            return None

        others = Peers(owner_of=lambda _: os.close, roomier=no_other)
        with pytest.raises(SessionError, match=r"has this session ended before it had"):
            await others.ask(os.close, {"jsonrpc": "2.0", "method": "x"})

    asyncio.run(ask())


def test_a_response_that_was_cut_off_is_refused() -> None:
    assert body_of(b'HTTP/1.1 200 OK\r\n\r\n{"id": 1}') == {"id": 1}
    for cut in (b"", b"HTTP/1.1 200 OK\r\n", b'HTTP/1.1 200 OK\r\n\r\n{"id', b"x\r\n\r\n[]"):
        with pytest.raises(ValueError, match=r"JSON|column"):
            body_of(cut)


def test_a_killed_isolated_session_ends_no_other(host: Callable[..., Host]) -> None:
    served = host(isolate=True, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    doomed, other = served.create_session(), served.create_session()
    call(served, other, "count")
    assert "exited with code 5" in call(served, doomed, "die")["error"]["message"]
    told = served.note_that_has("shard_exit")
    assert (told["sessions"], told["isolated"]) == (1, True)
    assert "Unknown session_id" in call(served, doomed, "count")["error"]["message"]
    assert call(served, other, "count")["result"]["count"] == 2
    assert (
        call(served, served.create_session(), "count")["result"]["count"] == 1
    )  # there is room again


def test_a_client_attaches_to_a_session(host: Callable[..., Host], isolate: bool) -> None:
    """The session goes on when the client has left."""
    served = host(isolate=isolate, max_sessions=1)
    session_id = served.create_session()
    served.note_that(sessions=1)
    pid = call(served, session_id, "count")["result"]["pid"]
    for expected in (2, 3):
        with served.open(f"/ws?session_id={session_id}") as client:
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
            answer = client.ask("mcp", {**request, "params": {"name": "count"}})
            assert answer["data"]["result"] == {"count": expected, "pid": pid}
            with served.open(f"/ws?session_id={session_id}") as second:
                assert "already has an attached" in second.receive()["data"]["message"]
            assert served.http("GET", "/capacity")[1]["sessions"] == 1
        until_detached(served, session_id)
    refused = served.rpc("openenv/session/create")["error"]
    assert (refused["data"]["max_sessions"], "1 of 1" in refused["message"]) == (1, True)
    assert served.rpc("openenv/session/close", session_id=session_id)["result"]["closed"] is True
    served.emptied()


def until_detached(host: Host, session_id: str) -> None:
    while True:
        with host.open(f"/ws?session_id={session_id}") as client:
            answer = client.ask("state")
        if answer["type"] == "state":
            return
