# SPDX-License-Identifier: Apache-2.0
"""What a client may send to a real env host, over HTTP and as a message."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import sys
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Opcode
from websockets.sync.client import connect

from openenvd.env_host.protocol import HostConfig
from openenvd.system.connection_limit import connections_within
from openenvd.system.units import MB

from .conftest import StartHost
from .hosts import WAIT_SECONDS, Host
from .raw import frame, opened

ECHO = "openenvd.envs.echo.environment:EchoEnvironment"
FEW_FDS, SOME_FDS = 300, 600
PROJECT = """
from fastapi import FastAPI, Request

app = FastAPI()

@app.post("/upload")
async def upload(request: Request) -> int:
    return len(await request.body())
"""


@pytest.fixture
def host(start: StartHost) -> Host:
    """An env host that takes messages and bodies of 2 MB."""
    started = start(ECHO, max_message_mb=2)
    started.ready()
    return started


def send(host: Host, *parts: bytes) -> bytes:
    """Send what can be sent; return the status line."""
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as peer:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                peer.sendall(part)
        return peer.recv(100).partition(b"\r\n")[0]


def head_of(request: str, **headers: str) -> bytes:
    headers = {"Host": "localhost", "Content-Type": "application/json", **headers}
    lines = [f"{request} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def resident_bytes(host: Host) -> int:
    process = psutil.Process(host.process.pid)
    return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])


def test_a_body_is_refused_by_its_announced_length(host: Host) -> None:
    for path in ("/step", "/reset", "/mcp", "/nowhere"):
        refused = send(host, head_of(f"POST {path}", **{"Content-Length": str(6 << 30)}))
        assert refused == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_chunked_body_is_refused_when_it_has_become_too_long(host: Host) -> None:
    chunk = b"100000\r\n" + b" " * MB + b"\r\n"
    before = resident_bytes(host)
    head = head_of("POST /step", **{"Transfer-Encoding": "chunked"})
    assert b" 413 " in send(host, head, *[chunk] * 200)
    assert resident_bytes(host) - before < 20 * MB


def test_an_endless_head_takes_no_memory(host: Host) -> None:
    before = resident_bytes(host)
    with contextlib.suppress(ConnectionError):
        assert send(host, head_of("GET /health")[:-2], b"X: ", *[b"x" * MB] * 200)[9:12] == b"431"
    assert resident_bytes(host) - before < 20 * MB
    assert host.http("GET", "/health")[0] == 200


def test_an_endless_second_head_of_a_connection_is_refused(host: Host) -> None:
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as peer:
        peer.sendall(head_of("GET /health"))
        answer = b""
        while not answer.endswith(b"}"):
            answer += peer.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        with contextlib.suppress(ConnectionError):
            for part in [head_of("GET /health")[:-2], *[b"x" * MB] * 200]:
                peer.sendall(part)
        assert peer.recv(100).startswith(b"HTTP/1.1 431")


def test_a_long_body_within_the_limit_passes(host: Host) -> None:
    text = "a" * (2 * MB - 1000)
    status, answer = host.http("POST", "/step", {"action": {"message": text}})
    assert (status, answer["observation"]["echoed_message"]) == (200, text)


def test_a_message_is_refused_by_its_announced_length(host: Host) -> None:
    before = resident_bytes(host)
    with connect(f"ws://127.0.0.1:{host.port}/ws", max_size=None) as client:
        client.socket.sendall(b"\x81\xff" + (6 << 30).to_bytes(8, "big") + b"mask")
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(WAIT_SECONDS)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
    assert resident_bytes(host) - before < 20 * MB


def test_a_message_beyond_the_setting_is_refused_and_one_within_passes(host: Host) -> None:
    def echoed(size: int) -> int:
        with connect(f"ws://127.0.0.1:{host.port}/ws", max_size=None) as client:
            message = {"type": "step", "data": {"message": "a" * size}}
            client.send(json.dumps({"type": "reset", "data": {}}))
            client.recv(WAIT_SECONDS)
            client.send(json.dumps(message))
            answer = json.loads(client.recv(WAIT_SECONDS))
            return int(answer["data"]["observation"]["message_length"])

    assert echoed(2 * MB - 1000) == 2 * MB - 1000
    with pytest.raises(ConnectionClosed) as closed:
        echoed(2 * MB)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_unfinished_messages_of_all_clients_are_bounded_together(host: Host) -> None:
    """The one of which most has come is closed; the others are answered when theirs are whole."""
    message = json.dumps({"type": "step", "data": {"message": "a" * (2 * MB - 5000)}}).encode()
    sent = frame(Opcode.TEXT, message)
    with contextlib.ExitStack() as stack:
        long = [stack.enter_context(opened(host)) for _ in range(4)]
        short, last = stack.enter_context(opened(host)), stack.enter_context(opened(host))
        for client in long:
            client.send(sent[:-2000])
        last.send(sent[: MB // 2])
        closing = select.select([each.connection for each in (*long, last)], [], [], WAIT_SECONDS)
        (closed,) = [each for each in long if each.connection in closing[0]]
        opcode, payload = closed.receive()
        assert (opcode, int.from_bytes(payload[:2], "big")) == (Opcode.CLOSE, 1013)
        short.text('{"type":"state"}')
        assert short.answer()["type"] == "state"
        for client in long:
            if client is not closed:
                client.send(sent[-2000:])
                assert client.answer()["type"] == "observation"
        last.send(sent[MB // 2 :])
        assert last.answer()["type"] == "observation"


def test_the_routes_of_a_projects_own_app_are_limited_too(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "upload.py").write_text(PROJECT)
    host = start(None, app_candidates=("upload:app",), serve_as_is=True, max_message_mb=2)
    host.ready()
    announced = head_of("POST /upload", **{"Content-Length": str(3 * MB)})
    chunked = head_of("POST /upload", **{"Transfer-Encoding": "chunked"})
    assert b" 413 " in send(host, announced)
    assert b" 413 " in send(host, chunked, *[b"100000\r\n" + b" " * MB + b"\r\n"] * 3)
    assert host.http("POST", "/upload", "a" * MB) == (200, MB)


def test_the_heads_of_a_projects_own_app_are_limited_too(start: StartHost, tmp_path: Path) -> None:
    (tmp_path / "upload.py").write_text(PROJECT)
    host = start(None, app_candidates=("upload:app",), serve_as_is=True)
    host.ready()
    endless = [head_of("POST /upload")[:-2], b"X: ", *[b"x" * MB] * 50]
    assert send(host, *endless)[9:12] == b"431"
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as peer:
        peer.sendall(head_of("GET /nowhere"))
        answer = b""
        while not answer.endswith(b"}"):
            answer += peer.recv(1000)
        assert answer.startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):
            for part in endless:
                peer.sendall(part)
        assert peer.recv(100).startswith(b"HTTP/1.1 431")


def test_silent_strangers_do_not_keep_others_out_of_a_projects_own_app(
    start: StartHost, tmp_path: Path
) -> None:
    (tmp_path / "upload.py").write_text(PROJECT)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FDS, limit[1]))
    try:
        host = start(None, app_candidates=("upload:app",), serve_as_is=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    host.ready()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * FEW_FDS):
            stack.enter_context(socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS))
        assert host.http("POST", "/upload", "a") == (200, 1)
        assert psutil.Process(host.process.pid).num_fds() < FEW_FDS


def test_requests_that_do_not_end_do_not_keep_sessions_out(tmp_path: Path) -> None:
    """HTTP may have half of a shard's descriptors."""
    python = tmp_path / "python-with-few-descriptors"
    python.write_text(f'#!/bin/sh\nulimit -n {SOME_FDS}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    config = HostConfig(name="echo", env_class=ECHO, shards=1, max_sessions=4)
    host = Host(config, tmp_path, python=str(python))
    with contextlib.ExitStack() as stack:
        stack.callback(host.close)
        host.ready()
        for _ in range(connections_within(SOME_FDS, shares=2)):
            peer = socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS)
            stack.enter_context(peer)
            peer.sendall(head_of("POST /step", **{"Content-Length": "100"}) + b"{")
        while host.http("GET", "/health")[0] != 503:  # until all have been taken
            pass
        with host.open() as client:
            assert client.ask("reset")["type"] == "observation"


def test_a_handshake_that_only_websockets_refuses_is_answered(start: StartHost) -> None:
    """uvicorn would say nothing, and keep the connection for ever."""
    host = start()
    host.ready()
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Origin": "http://evil.example",
        "Cookie": "a" * 9000,
    }
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as peer:
        peer.sendall(head_of("GET /ws", **upgrade))
        assert peer.recv(4096).startswith(b"HTTP/1.1 4")
        while peer.recv(4096):
            pass
