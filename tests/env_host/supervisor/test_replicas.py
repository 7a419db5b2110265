# SPDX-License-Identifier: Apache-2.0
"""Replicas of one address find each other's sessions: a connection may arrive at any of them.

Here each has an address of its own, so that a test decides which one a connection arrives at.
"""

from __future__ import annotations

import json
import signal
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..samples import TOOLS

Pair = tuple[Host, Host]


@pytest.fixture
def replicas(
    start: StartHost, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Pair]:
    """Starts two replicas of an environment with tools."""
    (tmp_path / "tools.py").write_text(TOOLS)
    doors: dict[str, Any] = {"doors": f"{tmp_path_factory.mktemp('d')}/d-"}

    def start_pair(**config: Any) -> Pair:
        first, second = (start("tools:Tools", replica=n, **(doors | config)) for n in (0, 1))
        for host in (first, second):
            host.ready()
        return first, second

    return start_pair


def rpc(host: Host, method: str, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return host.http("POST", "/mcp", body)[1]


@pytest.mark.parametrize("config", [{"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_session_of_another_replica_is_found(
    replicas: Callable[..., Pair], config: dict[str, Any]
) -> None:
    for here, there in (pair := replicas(**config), pair[::-1]):
        session = rpc(there, "openenv/session/create")["result"]["session_id"]
        for host, count in ((here, 1), (there, 2), (here, 3)):
            answer = rpc(host, "tools/call", session_id=session, name="count", arguments={})
            assert answer["result"] == {"count": count}
        with here.open(f"/ws?session_id={session}") as client:
            assert client.ask("reset")["type"] == "observation"
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "count"}}
            assert client.ask("mcp", call)["data"]["result"] == {"count": 4}
        assert rpc(here, "openenv/session/close", session_id=session)["result"]["closed"]
        there.emptied()


def test_nothing_is_lost_while_the_replica_that_has_the_session_is_slow(
    replicas: Callable[..., Pair],
) -> None:
    here, there = replicas()
    session = rpc(there, "openenv/session/create")["result"]["session_id"]
    params = {"session_id": session, "name": "count", "arguments": {}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    head = "POST /mcp HTTP/1.1\r\nhost: localhost\r\nconnection: close"
    head += f"\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request = (head + body).encode()
    there.process.send_signal(signal.SIGSTOP)
    with ExitStack() as clients:
        address = ("127.0.0.1", here.port)
        asking = [
            clients.enter_context(socket.create_connection(address, WAIT_SECONDS))
            for _ in range(40)  # a Unix socket keeps about ten datagrams
        ]
        for client in asking:
            client.sendall(request)
        assert here.http("GET", "/health")[0] == 200
        there.process.send_signal(signal.SIGCONT)
        answers = [client.makefile("rb").read().partition(b"\r\n\r\n")[2] for client in asking]
    counts = sorted(json.loads(answer)["result"]["count"] for answer in answers)
    assert counts == list(range(1, 41))


def test_a_door_is_its_users_alone_and_one_that_was_left_is_replaced(
    replicas: Callable[..., Pair], tmp_path: Path
) -> None:
    left = tmp_path / "d-1.door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.bind(str(left))
    here, there = replicas(doors=f"{tmp_path}/d-")
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    session = rpc(there, "openenv/session/create")["result"]["session_id"]
    assert "result" in rpc(here, "tools/list", session_id=session)


def test_a_session_of_a_replica_that_has_exited_is_unknown(replicas: Callable[..., Pair]) -> None:
    first, second = replicas()
    session = rpc(first, "openenv/session/create")["result"]["session_id"]
    assert first.stop() == 0
    assert "Unknown session_id" in rpc(second, "tools/list", session_id=session)["error"]["message"]
    with second.open(f"/ws?session_id={session}") as client:
        assert client.receive()["data"]["message"] == f"Unknown session_id: {session}"


def test_another_share_of_the_sessions_holds_at_once(start: StartHost, tmp_path: Path) -> None:
    host = start(doors=f"{tmp_path}/", max_sessions=2)
    assert host.ready()["max_sessions"] == 2

    def share(count: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.connect(f"{tmp_path}/0.door")
            end.send(json.dumps({"max_sessions": count}).encode() + b"\n")
        while host.note_that_has("capacity")["max_sessions"] != count:
            pass

    with host.open() as first, host.open() as second:
        assert {each.ask("reset")["type"] for each in (first, second)} == {"observation"}
        share(1)
        assert {each.ask("state")["type"] for each in (first, second)} == {"state"}
        with host.open() as third:
            assert third.receive()["data"]["code"] == "CAPACITY_REACHED"
        share(3)
        with host.open() as third:
            assert third.ask("reset")["type"] == "observation"
