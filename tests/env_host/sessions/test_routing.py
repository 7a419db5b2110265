# SPDX-License-Identifier: Apache-2.0
"""HTTP MCP sessions with several shards: every request reaches the shard that has its session."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.env_host.errors import SessionError
from openenvd.env_host.sessions.routing import Siblings, body_of

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

class ProcessTools(Plain):
    def __init__(self):
        self.mcp_server = ProcessServer()
"""


@pytest.fixture
def host(start: StartHost, tmp_path: Path) -> Callable[..., Host]:
    """Starts a host of `ProcessTools`."""
    (tmp_path / "tools.py").write_text(TOOLS + PROCESS_TOOLS)

    def start_tools(**config: Any) -> Host:
        started = start("tools:ProcessTools", **config)
        started.ready()
        return started

    return start_tools


def ask(host: Host, method: str, **params: Any) -> Json:
    """One JSON-RPC request over a connection of its own."""
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    status, answer = host.http("POST", "/mcp", body)
    assert status == 200
    assert answer["id"] == 7
    return dict(answer)


def create(host: Host) -> str:
    return str(ask(host, "openenv/session/create")["result"]["session_id"])


def call(host: Host, session_id: str, name: str, **arguments: Any) -> Json:
    return ask(host, "tools/call", session_id=session_id, name=name, arguments=arguments)


def test_twenty_sessions_with_four_shards_all_keep_their_state(host: Callable[..., Host]) -> None:
    served = host(shards=4, max_sessions=40)
    with ThreadPoolExecutor(20) as pool:
        ids = list(pool.map(lambda _: create(served), range(20)))
        for expected in (1, 2, 3):
            answers = list(pool.map(lambda i: call(served, i, "count")["result"], ids))
            assert [answer["count"] for answer in answers] == [expected] * 20
        assert len({answer["pid"] for answer in answers}) > 1
        closed = list(pool.map(lambda i: ask(served, "openenv/session/close", session_id=i), ids))
    assert all(answer["result"]["closed"] for answer in closed)
    assert served.http("GET", "/capacity")[1]["sessions"] == 0


def test_one_connection_may_carry_requests_for_many_sessions(host: Callable[..., Host]) -> None:
    served = host(shards=3, max_sessions=30)
    ids = [create(served) for _ in range(9)]
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    for session_id in ids:
        params = {"session_id": session_id, "name": "count", "arguments": {}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        connection.request("POST", "/mcp", json.dumps(body), JSON)
        assert json.loads(connection.getresponse().read())["result"]["count"] == 1
    connection.close()


def test_large_requests_are_forwarded_to_other_shards(host: Callable[..., Host]) -> None:
    served = host(shards=2, max_sessions=20)
    text = "x" * (3 << 20)
    for session_id in [create(served) for _ in range(4)]:
        for _ in range(2):
            assert call(served, session_id, "length", text=text)["result"] == len(text)


def test_a_session_is_created_where_there_is_room(host: Callable[..., Host]) -> None:
    served = host(shards=4, max_sessions=4)
    ids = [create(served) for _ in range(4)]
    pids = Counter(call(served, i, "count")["result"]["pid"] for i in ids)
    assert set(pids.values()) == {1}
    error = ask(served, "openenv/session/create")["error"]
    assert "All 4 sessions are in use" in error["message"]


def test_a_shard_that_exits_before_it_has_answered_is_reported() -> None:
    async def ask() -> None:
        async def no_other() -> None:
            return None

        siblings = Siblings(owner_of=lambda _: os.close, roomier=no_other)
        with pytest.raises(SessionError, match=r"has this session ended before it had"):
            await siblings.ask(os.close, {"jsonrpc": "2.0", "method": "x"})

    asyncio.run(ask())


def test_a_session_of_an_exited_shard_is_unknown(host: Callable[..., Host]) -> None:
    served = host(shards=2, max_sessions=20)
    session_id = create(served)
    os.kill(call(served, session_id, "count")["result"]["pid"], signal.SIGKILL)
    while "shard_exit" not in (served.note() or pytest.fail("no shard_exit")):
        pass
    answers = [call(served, session_id, "count") for _ in range(6)]
    assert all("Unknown session_id" in answer["error"]["message"] for answer in answers)


def test_a_response_that_was_cut_off_is_refused() -> None:
    assert body_of(b'HTTP/1.1 200 OK\r\n\r\n{"id": 1}') == {"id": 1}
    for cut in (b"", b"HTTP/1.1 200 OK\r\n", b'HTTP/1.1 200 OK\r\n\r\n{"id', b"x\r\n\r\n[]"):
        with pytest.raises(ValueError, match=r"JSON|column"):
            body_of(cut)


def test_with_isolation_each_session_has_a_process_of_its_own(host: Callable[..., Host]) -> None:
    served = host(isolate=True, max_sessions=6)
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda _: create(served), range(6)))
        for expected in (1, 2):
            answers = list(pool.map(lambda i: call(served, i, "count")["result"], ids))
            assert [answer["count"] for answer in answers] == [expected] * 6
    front = served.http("GET", "/capacity")[1]["shards"][0]["pid"]
    pids = {answer["pid"] for answer in answers}
    assert len(pids) == 6
    assert front not in pids
    assert "6 sessions" in ask(served, "openenv/session/create")["error"]["message"]
    for session_id in ids:
        assert ask(served, "openenv/session/close", session_id=session_id)["result"]["closed"]
    served.emptied()
    psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], WAIT_SECONDS)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_killed_isolated_session_ends_no_other(host: Callable[..., Host]) -> None:
    served = host(isolate=True, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    doomed, other = create(served), create(served)
    call(served, other, "count")
    assert "ended before it had answered" in call(served, doomed, "die")["error"]["message"]
    told = served.note_that_has("shard_exit")
    assert (told["sessions"], told["isolated"]) == (1, True)
    assert "Unknown session_id" in call(served, doomed, "count")["error"]["message"]
    assert call(served, other, "count")["result"]["count"] == 2
    assert call(served, create(served), "count")["result"]["count"] == 1  # there is room again


def test_a_client_attaches_to_an_isolated_session(host: Callable[..., Host]) -> None:
    """The session goes on when the client has left."""
    served = host(isolate=True, max_sessions=1)
    session_id = create(served)
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
    assert "1 sessions" in ask(served, "openenv/session/create")["error"]["message"]


def until_detached(host: Host, session_id: str) -> None:
    while True:
        with host.open(f"/ws?session_id={session_id}") as client:
            answer = client.ask("state")
        if answer["type"] == "state":
            return


def test_a_connection_is_not_bound_to_the_isolated_session_it_first_named(
    host: Callable[..., Host],
) -> None:
    served = host(isolate=True, max_sessions=2)
    ids = [create(served), create(served)]
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT_SECONDS)
    pids = set()
    for session_id in ids:
        params = {"session_id": session_id, "name": "count"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        connection.request("POST", f"/mcp?session_id={session_id}", json.dumps(body), JSON)
        pids.add(json.loads(connection.getresponse().read())["result"]["pid"])
    connection.close()
    assert len(pids) == 2


def test_isolated_sessions_outlive_the_front_shard_and_serve_its_replacement(
    host: Callable[..., Host],
) -> None:
    served = host(isolate=True, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    session_id = create(served)
    call(served, session_id, "count")
    os.kill(served.http("GET", "/capacity")[1]["shards"][0]["pid"], signal.SIGKILL)
    served.note_that_has("shard_exit")
    assert call(served, session_id, "count")["result"]["count"] == 2
