# SPDX-License-Identifier: Apache-2.0
"""A drained host (SIGUSR1) serves its sessions to their end, begins none, and exits with 0."""

from __future__ import annotations

import signal
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from openenvd.schema.protocol import DRAIN_HEADER, DRAIN_ROUTE

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..samples import TOOLS

AS_IS = """
from fastapi import FastAPI, WebSocket
app = FastAPI()
@app.websocket("/ws")
async def session(websocket: WebSocket):
    await websocket.accept()
    while True:
        await websocket.send_text(await websocket.receive_text())
@app.get("/health")
def health():
    return "healthy"
"""


def shared(folder: Path) -> dict[str, Any]:
    """Configure a replica that shares its address with others."""
    return {"doors": f"{folder}/", "shares_address": True}


def drain(host: Host) -> None:
    host.process.send_signal(signal.SIGUSR1)


def exit_code(host: Host) -> int:
    return host.process.wait(WAIT_SECONDS)


def refuses_connections(host: Host) -> bool:
    try:
        socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was in the queue of a socket that was just closed
        pass
    return False


def wait_until_closed(host: Host) -> None:
    while not refuses_connections(host):
        pass


@pytest.mark.parametrize("config", [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_host_with_a_secret_is_drained_by_who_sends_it(
    start: StartHost, config: dict[str, Any]
) -> None:
    host = start(drain_secret="a-secret-of-letters", **config)
    host.ready()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
        assert asked_to_drain(host, "another-secret") == 403
        assert asked_to_drain(host, "a-secret-of-letters", "GET") == 403
        assert asked_to_drain(host, "a-secret-of-letters") == 200
        assert client.ask("step", {})["type"] == "observation"
    assert exit_code(host) == 0


def test_a_host_without_a_secret_has_no_such_route(start: StartHost) -> None:
    host = start()
    host.ready()
    assert asked_to_drain(host, "") == 404


def asked_to_drain(host: Host, secret: str, method: str = "POST") -> int:
    connection = HTTPConnection("127.0.0.1", host.port, timeout=WAIT_SECONDS)
    connection.request(method, DRAIN_ROUTE, headers={DRAIN_HEADER: secret})
    status = connection.getresponse().status
    connection.close()
    return status


def closes_after_answer(connection: HTTPConnection) -> bool:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    return answer.will_close


@pytest.mark.parametrize("config", [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_session_goes_on_and_the_host_exits_when_it_has_ended(
    start: StartHost, config: dict[str, Any], tmp_path: Path
) -> None:
    host = start(**shared(tmp_path), **config)
    host.ready()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
        drain(host)
        wait_until_closed(host)
        drain(host)  # a second one changes nothing
        assert client.ask("step", {})["type"] == "observation"
        assert host.process.poll() is None
    assert exit_code(host) == 0


def test_without_sessions_it_exits_at_once(start: StartHost) -> None:
    host = start()
    host.ready()
    drain(host)
    assert exit_code(host) == 0


def test_a_session_that_does_not_end_is_ended_by_a_stop(start: StartHost, tmp_path: Path) -> None:
    host = start(**shared(tmp_path))
    host.ready()
    with host.open() as client:
        client.ask("reset")
        drain(host)
        wait_until_closed(host)
        assert host.stop() == 0
        assert client.receive()["data"]["message"] == "The environment is stopping."


def test_an_address_of_its_own_goes_on_accepting_and_refuses_new_sessions(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    host = start("tools:Tools")
    host.ready()

    def rpc(method: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return host.http("POST", "/mcp", body)[1]

    session = rpc("openenv/session/create")["result"]["session_id"]
    drain(host)
    host.until(lambda capacity: capacity["draining"])
    with pytest.raises(InvalidStatus) as refused, host.open():
        pass
    assert refused.value.response.status_code == 503
    assert "drained" in refused.value.response.body.decode()
    assert refused.value.response.headers["Retry-After"] == "1"
    assert "error" in rpc("openenv/session/create")
    for count in (1, 2):
        answer = rpc("tools/call", session_id=session, name="count", arguments={})
        assert answer["result"] == {"count": count}
    assert rpc("openenv/session/close", session_id=session)["result"]["closed"]
    assert exit_code(host) == 0


def test_an_http_session_is_found_by_way_of_another_replica(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    left, right = (start("tools:Tools", replica=n, **shared(tmp_path)) for n in (0, 1))
    for host in (left, right):
        host.ready()
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    session = left.http("POST", "/mcp", create)[1]["result"]["session_id"]
    drain(left)
    wait_until_closed(left)
    params = {"session_id": session, "name": "count", "arguments": {}}
    for count in (1, 2):
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        assert right.http("POST", "/mcp", call)[1]["result"] == {"count": count}
    close = {"jsonrpc": "2.0", "id": 3, "method": "openenv/session/close", "params": params}
    assert right.http("POST", "/mcp", close)[1]["result"]["closed"]
    assert exit_code(left) == 0


@pytest.mark.parametrize("as_is", [False, True])
def test_a_kept_http_connection_ends_with_its_next_answer(
    start: StartHost, tmp_path: Path, as_is: bool
) -> None:
    (tmp_path / "project.py").write_text(AS_IS)
    what = {"app_candidates": ("project:app",), "serve_as_is": True} if as_is else {}
    host = start(None if as_is else "Counter", **shared(tmp_path), **what)
    host.ready()
    connection = HTTPConnection("127.0.0.1", host.port, timeout=WAIT_SECONDS)
    assert not closes_after_answer(connection)
    with host.open() as client:
        drain(host)
        wait_until_closed(host)
        while not closes_after_answer(connection):
            pass
        client.connection.close()
    connection.close()
    assert exit_code(host) == 0


def test_an_app_served_as_it_is_ends_with_its_last_connection(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "project.py").write_text(AS_IS)
    host = start(None, app_candidates=("project:app",), serve_as_is=True)
    host.ready()
    with host.open() as client:
        drain(host)
        wait_until_closed(host)
        assert client.ask("echo") == {"type": "echo"}
        assert host.process.poll() is None
    assert exit_code(host) == 0
