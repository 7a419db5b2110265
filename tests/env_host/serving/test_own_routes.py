# SPDX-License-Identifier: Apache-2.0
"""What a project serves besides sessions keeps its state: the same process answers all of it."""

import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from openenvd.system.process.descriptors import MAX_PACKET_BYTES

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..raw import HEALTH, Raw
from ..upstream import write_upstream

SHARDS = 3
ANNOUNCED = b"POST /note HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
LARGE = b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"x": "%b"}}' % (b"x" * 3_000_000)

PROJECT = """
import os
from contextlib import asynccontextmanager
from fastapi import Request, WebSocket
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen

app = create_app(Counter, Do, Seen)
seen = []

@app.post("/note")
async def note(request: Request):
    seen.append(len(await request.body()))
    return {"pid": os.getpid(), "count": len(seen), "size": seen[-1]}

@app.websocket("/chat/{name}")
async def chat(socket: WebSocket, name: str):
    await socket.accept()
    seen.append(0)
    await socket.send_json({"pid": os.getpid(), "count": len(seen)})
    await socket.close()

def write(what):
    with open("hooks.log", "a") as log:
        log.write(f"{what} {os.getpid()}\\n")

theirs = app.router.lifespan_context

@asynccontextmanager
async def lifespan(app):
    async with theirs(app) as state:
        write("start")
        yield state
        write("stop")

app.router.lifespan_context = lifespan
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder of a project that has routes and hooks of its own."""
    write_upstream(tmp_path)
    (tmp_path / "app.py").write_text(PROJECT)
    return tmp_path


@pytest.fixture
def host(serve: StartHost, project: Path) -> Iterator[Host]:
    """A project of which every shard has been forked.

    The home shard has sessions, so that connections are given to the others first.
    """
    host = serve(None, app_candidates=("app:app",), shards=SHARDS, max_sessions=64)
    with ExitStack() as stack, ExitStack() as others:
        clients = [host.open().__enter__() for _ in range(4 * SHARDS)]
        pids = [client.pid() for client in clients]
        assert len(set(pids)) == SHARDS
        home = home_of(host)
        for client, pid in zip(clients, pids, strict=True):
            (stack if pid == home else others).push(client)
        others.close()
        host.until(lambda capacity: capacity["sessions"] == pids.count(home))
        yield host


def home_of(host: Host) -> int:
    pid: int = host.http("GET", "/capacity")[1]["shards"][0]["pid"]
    return pid


class Kept:
    """A connection that is kept alive."""

    def __init__(self, host: Host) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=WAIT_SECONDS)
        self._connection.connect()
        self._socket = self._connection.sock
        self.close = self._connection.close

    def ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        self._connection.request(method, path, body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        assert response.status == 200
        assert self._connection.sock is self._socket, "it was not kept alive"
        return json.loads(response.read())

    def send_what_fits(self, head: bytes) -> int:
        """Send a head, and as much of a body as the kernel takes now."""
        self._socket.sendall(head)
        self._socket.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 2_000_000:
                sent += self._socket.send(b"x" * 65536)
        self._socket.settimeout(WAIT_SECONDS)
        return sent

    def is_refused(self) -> bool:
        """Whether the connection is answered 503, or reset."""
        try:
            return self._socket.recv(1000).startswith(b"HTTP/1.1 503")
        except ConnectionError:
            return True


@contextmanager
def kept(host: Host, *, by_another: bool = True) -> Iterator[Kept]:
    """A connection; another shard than the home shard has answered a request on it already."""
    made = Kept(host)
    try:
        if by_another:
            assert made.ask("GET", "/health") != home_of(host)
        yield made
    finally:
        made.close()


def test_own_routes_and_hooks_are_those_of_one_process(host: Host, project: Path) -> None:
    home = home_of(host)
    for count in range(1, 13):
        with connect(f"ws://127.0.0.1:{host.port}/chat/x") as socket:
            assert json.loads(socket.recv(WAIT_SECONDS)) == {"pid": home, "count": count}
    with kept(host) as connection:
        assert connection.ask("GET", "/health") != home
        assert connection.ask("POST", "/note", b"xy") == {"pid": home, "count": 13, "size": 2}
        assert connection.ask("GET", "/health") == home, "it goes back and forth"
        assert connection.ask("POST", "/note")["count"] == 14
    with ThreadPoolExecutor(8) as pool:
        answers = [
            answer for _, answer in pool.map(lambda _: host.http("POST", "/note", "x"), range(40))
        ]
    assert sorted(answer["count"] for answer in answers) == list(range(15, 55))
    assert {answer["pid"] for answer in answers} == {home}
    assert host.stop() == 0
    assert (project / "hooks.log").read_text() == f"start {home}\nstop {home}\n"


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_large_body_reaches_an_own_route_whole(host: Host, is_kept: bool) -> None:
    body = b"x" * 3_000_000
    for _ in range(5):
        with kept(host, by_another=is_kept) as connection:
            answer = connection.ask("POST", "/note", body)
        assert (answer["pid"], answer["size"]) == (home_of(host), len(body))


def test_a_pipelined_request_for_an_own_route_is_refused_where_it_cannot_be_passed_on(
    host: Host,
) -> None:
    with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as connection:
        connection.sendall(HEALTH + HEALTH.replace(b"/health", b"/anything"))
        raw = Raw(connection)
        assert raw.head().startswith(b"HTTP/1.1 200")
        assert int(raw.read(len(str(home := home_of(host))))) != home
        assert raw.head().startswith(b"HTTP/1.1 421")


def test_the_successor_of_the_home_shard_answers_what_waits_for_it(
    host: Host, project: Path
) -> None:
    home = home_of(host)
    os.kill(home, signal.SIGSTOP)
    with kept(host) as connection, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(connection.ask, "POST", "/note")
        host.until(
            lambda capacity: sum(s["totals"]["handed_over"] for s in capacity["shards"]) == 1
        )
        os.kill(home, signal.SIGKILL)
        successor = answer.result(WAIT_SECONDS)
    assert successor["count"] == 1
    assert successor["pid"] != home
    started = (project / "hooks.log").read_text().splitlines()
    assert started == [f"start {home}", f"start {successor['pid']}"]


def test_a_project_with_hooks_is_served_by_one_process_unless_more_are_asked_for(
    start: StartHost, project: Path
) -> None:
    host = start(None, app_candidates=("app:app",), shards=None, max_sessions=64)
    assert host.ready()["shards"] == 1
    assert "has start-up or shutdown hooks" in host.log.read_text()


def test_hooks_of_libraries_are_not_the_projects(serve: StartHost, project: Path) -> None:
    (project / "app.py").write_text(PROJECT.partition("theirs = ")[0])
    host = serve(None, app_candidates=("app:app",), shards=None, max_sessions=64, cores=None)
    assert "hooks" not in host.log.read_text()


@pytest.fixture
def no_files(project: Path) -> None:
    """The project of which no process can make temporary files."""
    (project / "app.py").write_text(PROJECT + "import tempfile\ntempfile.tempdir = '/nowhere'\n")


def test_a_connection_that_cannot_be_passed_on_is_ended(no_files: None, host: Host) -> None:
    """What was read of it is too much for a message, and there is no place for a file."""
    with kept(host) as connection:
        connection.ask("POST", "/mcp", LARGE)  # the kernel gives it a larger buffer
        other = connection.ask("GET", "/health")
        os.kill(other, signal.SIGSTOP)  # so that much is read at once
        try:
            sent = connection.send_what_fits(ANNOUNCED)
        finally:
            os.kill(other, signal.SIGCONT)
        assert sent > MAX_PACKET_BYTES
        assert connection.is_refused()
    assert "could not be passed to another process" in host.log.read_text()
