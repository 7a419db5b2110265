# SPDX-License-Identifier: Apache-2.0
"""What a client may send to a real env host, over HTTP and as a message."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Opcode
from websockets.sync.client import connect

from openenvd.system.net.connection_limit import connections_within
from openenvd.system.text.units import MB

from ..conftest import ECHO, StartHost
from ..hosts import WAIT_SECONDS, Host, python_with_few_descriptors
from ..raw import UPGRADE, Raw, frame, opened

FEW_FDS, SOME_FDS = 300, 600
PROJECT = """
from fastapi import FastAPI, Request

app = FastAPI()

@app.post("/step")
async def step(request: Request):
    return {"size": len(await request.body())}
"""
LIMITS: dict[str, Any] = {"max_message_mb": 2}


@pytest.fixture
def project(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "upload.py").write_text(PROJECT)
    return {"what": None, "app_candidates": ("upload:app",), "serve_as_is": True}


@pytest.fixture(params=["class", "project"])
def limited(request: pytest.FixtureRequest, serve: StartHost, project: dict[str, Any]) -> Host:
    return serve(**project, **LIMITS) if request.param == "project" else serve(ECHO, **LIMITS)


@pytest.fixture
def host(serve: StartHost) -> Host:
    """An env host that takes messages of 2 MB."""
    return serve(ECHO, reset_first=False, **LIMITS)


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


def long_step(most_mb: int) -> bytes:
    """A step's frame, whose message is hardly shorter than so many MB."""
    message = {"type": "step", "data": {"message": "a" * (most_mb * MB - 5000)}}
    return frame(Opcode.TEXT, json.dumps(message).encode())


@contextlib.contextmanager
def beside(jobs: Iterable[Callable[[], None]]) -> Iterator[None]:
    """Run each of these in a thread of its own, to its end."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(WAIT_SECONDS)


def test_a_head_or_body_beyond_the_limit_is_refused_and_one_within_passes(limited: Host) -> None:
    for path in ("/step", "/reset", "/mcp", "/nowhere"):
        refused = send(limited, head_of(f"POST {path}", **{"Content-Length": str(6 << 30)}))
        assert refused == b"HTTP/1.1 413 Request Entity Too Large"
    chunked = head_of("POST /step", **{"Transfer-Encoding": "chunked"})
    parts = [b"100000\r\n" + b" " * MB + b"\r\n"] * 3
    assert send(limited, chunked, *parts).startswith(b"HTTP/1.1 413")
    endless = [head_of("GET /health")[:-2], b"X: ", *[b"x" * MB] * 200]
    with contextlib.suppress(ConnectionError):
        assert send(limited, *endless)[9:12] == b"431"
    body = {"action": {"message": "a" * (2 * MB - 1000)}}
    assert limited.http("POST", "/step", body)[0] == 200


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


def test_long_messages_are_answered_beside_unfinished_ones_that_go_on_by_bytes(
    start: StartHost,
) -> None:
    host = start(ECHO, reset_first=False, max_message_mb=8)
    host.ready()
    sent = long_step(8)
    rest = len(sent) - 2000
    is_over = threading.Event()

    def drip(client: Raw) -> None:
        at = rest
        while at < len(sent):
            end = len(sent) if is_over.wait(0.1) else at + 1
            client.send(sent[at:end])
            at = end

    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(opened(host)) for _ in range(4)]
        short, last = stack.enter_context(opened(host)), stack.enter_context(opened(host))
        for client in slow:
            client.send(sent[:rest])
        with beside(partial(drip, client) for client in slow):
            last.send(sent)
            assert last.answer()["type"] == "observation"
            short.text('{"type":"state"}')
            assert short.answer()["type"] == "state"
            is_over.set()
            for client in slow:
                assert client.answer()["type"] == "observation"


def test_of_more_unfinished_messages_than_may_be_the_largest_is_closed(host: Host) -> None:
    sent = long_step(2)
    with contextlib.ExitStack() as stack:
        largest = stack.enter_context(opened(host))
        largest.send(sent[:-10])
        for _ in range(250):
            stack.enter_context(opened(host)).send(sent[:200_000])
        opcode, payload = largest.receive()
        assert (opcode, int.from_bytes(payload[:2], "big")) == (Opcode.CLOSE, 1013)


def test_silent_strangers_do_not_keep_others_out_of_a_projects_own_app(
    serve: StartHost, project: dict[str, Any], tmp_path: Path
) -> None:
    host = serve(**project, python=python_with_few_descriptors(tmp_path, FEW_FDS))
    with contextlib.ExitStack() as stack:
        for _ in range(2 * FEW_FDS):
            stack.enter_context(socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS))
        assert host.http("POST", "/step", "a") == (200, {"size": 1})
        assert psutil.Process(host.process.pid).num_fds() < FEW_FDS


def test_a_low_limit_on_descriptors_is_named_at_the_launch(
    start: StartHost, tmp_path: Path
) -> None:
    python = python_with_few_descriptors(tmp_path, 256)
    ready = start(ECHO, shards=2, python=python).ready()
    assert ready["max_sessions"] == 2
    [told] = ready["notes"]
    assert told.startswith("only 2 of 1024 sessions are possible:")
    assert "256 (ulimit -Hn)" in told


def test_requests_that_do_not_end_do_not_keep_sessions_out(
    serve: StartHost, tmp_path: Path
) -> None:
    """HTTP may have half of a shard's descriptors."""
    host = serve(ECHO, max_sessions=4, python=python_with_few_descriptors(tmp_path, SOME_FDS))
    with contextlib.ExitStack() as stack:
        for _ in range(connections_within(SOME_FDS, shares=2)):
            peer = socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS)
            stack.enter_context(peer)
            peer.sendall(head_of("POST /step", **{"Content-Length": "100"}) + b"{")
        while host.http("GET", "/health")[0] != 503:  # until all have been taken
            pass
        with host.open() as client:
            assert client.ask("reset")["type"] == "observation"


def test_a_handshake_that_only_websockets_refuses_is_answered(serve: StartHost) -> None:
    """uvicorn would say nothing, and keep the connection for ever."""
    host = serve()
    upgrade = {**UPGRADE, "Origin": "http://evil.example", "Cookie": "a" * 9000}
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as peer:
        peer.sendall(head_of("GET /ws", **upgrade))
        assert peer.recv(4096).startswith(b"HTTP/1.1 4")
        while peer.recv(4096):
            pass
