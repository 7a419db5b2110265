# SPDX-License-Identifier: Apache-2.0
"""Replicas of one address find each other's sessions: a connection may arrive at any of them.

Here each has an address of its own, so that a test decides which one a connection arrives at.
"""

import contextlib
import json
import signal
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from openenvd.env_host.ipc.fd_messages import PeerReplicas
from openenvd.schema.protocol import ATTEMPT_HEADER, ATTEMPTS_HEADER, RETRY_HEADER

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..samples import TOOLS

Pair = tuple[Host, Host]


@pytest.fixture
def replicas(
    start: StartHost, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Pair]:
    (tmp_path / "tools.py").write_text(TOOLS)
    doors: dict[str, Any] = {"doors": f"{tmp_path_factory.mktemp('d')}/d-"}

    def start_pair(**config: Any) -> Pair:
        first, second = (start("tools:Tools", replica=n, **(doors | config)) for n in (0, 1))
        for host in (first, second):
            host.ready()
        return first, second

    return start_pair


@pytest.mark.parametrize("config", [{"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_session_of_another_replica_is_found(
    replicas: Callable[..., Pair], config: dict[str, Any]
) -> None:
    for here, there in (pair := replicas(**config), pair[::-1]):
        session = there.create_session()
        for host, count in ((here, 1), (there, 2), (here, 3)):
            answer = host.rpc("tools/call", session_id=session, name="count", arguments={})
            assert answer["result"] == {"count": count}
        with here.open(f"/ws?session_id={session}") as client:
            assert client.ask("reset")["type"] == "observation"
            call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "count"}}
            assert client.ask("mcp", call)["data"]["result"] == {"count": 4}
        assert here.rpc("openenv/session/close", session_id=session)["result"]["closed"]
        there.emptied()


def test_nothing_is_lost_while_the_replica_that_has_the_session_is_slow(
    replicas: Callable[..., Pair],
) -> None:
    here, there = replicas()
    session = there.create_session()
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
    session = there.create_session()
    assert "result" in here.rpc("tools/list", session_id=session)


def test_a_session_of_a_replica_that_has_exited_is_unknown(replicas: Callable[..., Pair]) -> None:
    first, second = replicas()
    session = first.create_session()
    assert first.stop() == 0
    assert "Unknown session_id" in second.rpc("tools/list", session_id=session)["error"]["message"]
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


@pytest.mark.parametrize("config", [{"shards": 2}, {"isolate": True}])
def test_a_client_is_refused_only_once_each_replica_of_the_address_was_asked(
    start: StartHost, tmp_path: Path, config: dict[str, Any]
) -> None:
    config = config | {"doors": f"{tmp_path}/d-", "shares_address": True, "max_sessions": 2}
    hosts = [start(replica=n, **config) for n in range(4)]
    full, drained, free, killed = hosts
    with ExitStack() as clients:
        for host in hosts:
            host.ready()
        for host in (full, full, drained):
            assert clients.enter_context(host.open()).ask("reset")["type"] == "observation"
        drained.process.send_signal(signal.SIGUSR1)
        drained.note_that_has("draining")
        killed.process.kill()  # it leaves its control socket
        killed.process.wait(WAIT_SECONDS)
        for _ in range(2):
            client = clients.enter_context(full.open())
            assert client.ask("reset")["type"] == "observation"
        free.until(lambda capacity: capacity["sessions"] == 2)
        with full.open() as client:
            assert client.receive()["data"]["code"] == "CAPACITY_REACHED"


def test_each_replica_is_asked_once_whichever_was_first_and_whichever_exits(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/d-"
    ends = [PeerReplicas(prefix, number).open() for number in range(12)]
    assert all(end is not None for end in ends)
    for killed in (3, 11):
        ends[killed].close()  # type: ignore[union-attr]
    gone = {3, 11}
    for first in (0, 5, 10):
        asked = [first]
        while (number := PeerReplicas(prefix, asked[-1]).next_with_room(first)) is not None:
            asked.append(number)
            if len(asked) == 4 and (end := ends[first]) is not None:
                end.close()  # the first of them exits meanwhile
        assert sorted(asked) == sorted({*range(12)} - gone)
        gone.add(first)
    for end in ends:
        if end is not None:
            end.close()


# A host without room, behind a gateway, sends handshakes on to another replica


def attempt(number: str, most: str) -> dict[str, str]:
    return {ATTEMPT_HEADER: number, ATTEMPTS_HEADER: most}


def refusal(host: Host, headers: dict[str, str] | None = None) -> InvalidStatus | None:
    try:
        with host.open(additional_headers=headers):
            return None
    except InvalidStatus as exc:
        return exc


def first_answer(host: Host, headers: dict[str, str]) -> str:
    with host.open(additional_headers=headers) as session:
        with contextlib.suppress(ConnectionClosed):  # it was refused, and says why
            session.send("reset")
        answer = session.receive()
    return str(answer["data"].get("code") or answer["type"])


@pytest.mark.parametrize("config", [{}, {"isolate": True}, {"shards": 2}])
def test_a_host_without_room_sends_a_handshake_on_as_long_as_another_may_be_asked(
    serve: StartHost, config: dict[str, object]
) -> None:
    sessions = 2
    host = serve(max_sessions=sessions, admission_timeout_seconds=0.5, **config)
    with host.open() as one, host.open() as two:
        assert [each.ask("reset")["type"] for each in (one, two)] == ["observation"] * sessions
        refused = refusal(host, attempt("1", "2"))
        assert refused is not None
        assert refused.response.status_code == 503
        assert refused.response.headers[RETRY_HEADER] == "1"
        for headers in (attempt("2", "2"), attempt("1", "1"), attempt("x", "2"), {}):
            assert first_answer(host, headers) == "CAPACITY_REACHED"
    assert first_answer(host, attempt("1", "2")) == "observation"
