# SPDX-License-Identifier: Apache-2.0
"""A drained host (SIGUSR1) serves its sessions to their end, begins none, and exits with 0."""

import os
import signal
import socket
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import InvalidStatus

from openenvd.schema.protocol import DRAIN_HEADER, DRAIN_ROUTE, RETRY_HEADER

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Client, Host
from ..raw import HEAD, raw
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


def test_a_host_with_a_secret_is_drained_by_who_sends_it(
    serve: StartHost, config: dict[str, Any]
) -> None:
    host = serve(drain_secret="a-secret-of-letters", **config)
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
        assert asked_to_drain(host, "another-secret") == 403
        assert asked_to_drain(host, "a-secret-of-letters", "GET") == 403
        assert asked_to_drain(host, "a-secret-of-letters") == 200
        assert client.ask("step", {})["type"] == "observation"
    assert exit_code(host) == 0


def test_a_host_without_a_secret_has_no_such_route_and_exits_at_once_without_sessions(
    serve: StartHost,
) -> None:
    host = serve()
    assert asked_to_drain(host, "") == 404
    drain(host)
    assert exit_code(host) == 0


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


def test_a_session_goes_on_and_the_host_exits_when_it_has_ended(
    serve: StartHost, config: dict[str, Any], tmp_path: Path
) -> None:
    host = serve(**shared(tmp_path), **config)
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
        drain(host)
        wait_until_closed(host)
        drain(host)  # a second one changes nothing
        assert client.ask("step", {})["type"] == "observation"
        assert host.process.poll() is None
    assert exit_code(host) == 0


def test_a_session_that_does_not_end_is_ended_by_a_stop(serve: StartHost, tmp_path: Path) -> None:
    host = serve(**shared(tmp_path))
    with host.open() as client:
        client.ask("reset")
        drain(host)
        wait_until_closed(host)
        assert host.stop() == 0
        assert client.receive()["data"]["message"] == "This replica of the environment is stopping."


def test_an_address_of_its_own_goes_on_accepting_and_refuses_new_sessions(
    serve: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    host = serve("tools:Tools")
    session = host.create_session()
    drain(host)
    host.until(lambda capacity: capacity["draining"])
    with pytest.raises(InvalidStatus) as refused, host.open():
        pass
    assert refused.value.response.status_code == 503
    assert "drained" in refused.value.response.body.decode()
    for name in ("Retry-After", RETRY_HEADER):  # by which a gateway asks another replica
        assert refused.value.response.headers[name] == "1"
    assert "error" in host.rpc("openenv/session/create")
    for count in (1, 2):
        answer = host.rpc("tools/call", session_id=session, name="count", arguments={})
        assert answer["result"] == {"count": count}
    assert host.rpc("openenv/session/close", session_id=session)["result"]["closed"]
    assert exit_code(host) == 0


@pytest.mark.parametrize("as_is", [False, True])
def test_a_kept_http_connection_ends_with_its_next_answer(
    serve: StartHost, tmp_path: Path, as_is: bool
) -> None:
    (tmp_path / "project.py").write_text(AS_IS)
    what = {"app_candidates": ("project:app",), "serve_as_is": True} if as_is else {}
    host = serve(None if as_is else "Counter", **shared(tmp_path), **what)
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
    serve: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "project.py").write_text(AS_IS)
    host = serve(None, app_candidates=("project:app",), serve_as_is=True)
    with host.open() as client:
        drain(host)
        wait_until_closed(host)
        assert client.ask("echo") == {"type": "echo"}
        assert host.process.poll() is None
    assert exit_code(host) == 0


# What has been accepted before is served, however little of it has arrived


def has(process: psutil.Process, port: int) -> bool:
    """Whether a process has the connection of the client at this port."""
    return any(port in each.raddr[1:] for each in process.net_connections("tcp"))


def wait_until_accepted(host: psutil.Process, port: int) -> None:
    while not has(host, port):
        assert host.is_running()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_client_that_has_connected_gets_its_session(
    serve: StartHost, tmp_path: Path, config: dict[str, Any], number: signal.Signals
) -> None:
    host = serve(doors=f"{tmp_path}/", shares_address=True, **config)
    with raw(host) as client:
        port = client.connection.getsockname()[1]
        while not any(has(shard, port) for shard in psutil.Process(host.process.pid).children()):
            assert host.process.poll() is None
        host.process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):  # it has looked several times by then
            host.process.wait(0.5)
        client.send(HEAD)
        assert b"101" in client.head()
        client.text('{"type": "reset"}')
        assert client.answer()["type"] == "observation"
    assert host.process.wait(WAIT_SECONDS) == 0


# Whose processes start as programs, and import it for themselves, the second time only when told.
SLOW_SHARDS = """
import os, threading, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
threading.Thread(target=time.sleep, args=(3600.0,), daemon=True).start()
if os.path.exists("imported"):
    while not os.path.exists("go"):
        time.sleep(0.01)
open("imported", "w").close()

class Slow(EchoEnvironment):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_client_that_waits_for_the_first_shard_gets_its_session(
    start: StartHost, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SHARDS)
    host = start("slow:Slow", doors=f"{tmp_path}/", shares_address=True)
    with raw(host) as client:
        client.send(HEAD)
        wait_until_accepted(psutil.Process(host.process.pid), client.connection.getsockname()[1])
        host.process.send_signal(number)
        host.note_that(draining=True)
        (tmp_path / "go").touch()
        assert b"101" in client.head()
        client.text('{"type": "reset"}')
        assert client.answer()["type"] == "observation"
    assert host.process.wait(WAIT_SECONDS) == 0


def test_one_that_nobody_waits_for_ends_at_once(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_SHARDS)
    host = start("slow:Slow", doors=f"{tmp_path}/", shares_address=True)
    process = psutil.Process(host.process.pid)
    while not process.children():  # it imports
        assert host.process.poll() is None
    host.process.send_signal(signal.SIGUSR2)
    assert host.process.wait(WAIT_SECONDS) == 0


# A successor with a gate gets ready, and accepts nothing before the gate is opened


SESSIONS = 20  # that the closed host accepts none of by chance once in a million times
HEADER = "OpenEnvd-Replica"


def replica_of(host: Host) -> str:
    with host.open() as client:
        return reset(client)


def reset(client: Client) -> str:
    assert client.ask("reset")["type"] == "observation"
    response = client.connection.response
    assert response is not None
    return response.headers[HEADER]


def test_a_hosts_successor_takes_its_address_when_the_gate_opens(
    start: StartHost, config: dict[str, Any]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    reading, writing = os.pipe()
    old = start(listener=listener.dup(), headers={HEADER: "old"}, **config)
    new = start(listener=listener.dup(), gate_fd=reading, headers={HEADER: "new"}, **config)
    os.close(reading)
    listener.close()
    for host in (old, new):
        host.ready()
    assert {replica_of(new) for _ in range(SESSIONS)} == {"old"}
    with old.open() as kept:
        assert reset(kept) == "old"
        os.close(writing)
        old.process.send_signal(signal.SIGUSR2)
        while {replica_of(new) for _ in range(SESSIONS)} != {"new"}:
            pass  # until the old one has taken note
        assert kept.ask("step", {})["type"] == "observation"
        assert old.process.poll() is None
    assert old.process.wait(WAIT_SECONDS) == 0


# A host that nobody uses exits, and says so; what connects meanwhile is left to the next one


SHORT = 0.05  # seconds without use


def slept(host: Host) -> int:
    host.note_that(sleeps=True)
    return host.process.wait(WAIT_SECONDS)


def test_a_host_sleeps_after_its_last_session(serve: StartHost, config: dict[str, Any]) -> None:
    host = serve(sleep_after_seconds=1.0, **config)
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    assert slept(host) == 0


def test_a_session_keeps_a_host_awake(serve: StartHost) -> None:
    host = serve(sleep_after_seconds=SHORT)
    with host.open() as client:
        for _ in range(20):
            answer = client.ask("reset")
            assert answer["type"] == "observation", answer
            client.connection.ping().wait(SHORT)
        host.note_that(sessions=1)
        assert host.process.poll() is None
    assert slept(host) == 0


def test_a_replica_with_others_at_its_address_stays_awake(serve: StartHost, tmp_path: Path) -> None:
    other = tmp_path / "trial-1.door"
    other.touch()
    host = serve(sleep_after_seconds=SHORT, doors=f"{tmp_path}/trial-", shares_address=True)
    time.sleep(10 * SHORT)
    assert host.process.poll() is None
    other.unlink()
    assert slept(host) == 0
