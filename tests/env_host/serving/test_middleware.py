# SPDX-License-Identifier: Apache-2.0
"""A project's middleware refuses and accepts what it does where its app is served by uvicorn."""

import json
import select
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from openenvd.env_host.startup import sessions_of_process

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, python_with_few_descriptors, uvicorn_serving
from ..raw import HEAD, HEALTH, raw

FEW_FDS = 300
PROJECT = """
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen

app = create_app(Counter, Do, Seen)

class Around:
    def __init__(self, app):
        self.app = app

def token_of(scope):
    return dict(scope["headers"]).get(b"x-token", b"").decode()

async def answer(send, kind, status, body):
    headers = [(b"x-why", b"token")]
    await send({"type": kind + ".start", "status": status, "headers": headers})
    await send({"type": kind + ".body", "body": body})
"""
CLOSES = """
class Closes(Around):
    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket" and token_of(scope) != "good":
            await send({"type": "websocket.close", "code": 4001})
        elif scope["type"] == "http" and token_of(scope) != "good":
            await answer(send, "http.response", 401, b"no token")
        else:
            await self.app(scope, receive, send)

app.add_middleware(Closes)
"""
ANSWERS = """
class Answers(Around):
    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket" and token_of(scope) != "good":
            await receive()
            await answer(send, "websocket.http.response", 429, b"later")
        else:
            await self.app(scope, receive, send)

app = Answers(app)
"""
ADDS = """
class Adds(Around):
    async def __call__(self, scope, receive, send):
        async def with_header(message):
            if message["type"].endswith((".accept", ".start")):
                message = {**message, "headers": [*message.get("headers", ()), (b"x-seen", b"yes")]}
            await send(message)
        await self.app(scope, receive, with_header)

app.add_middleware(Adds)
"""
RAISES = """
class Raises(Around):
    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket" and token_of(scope) != "good":
            raise RuntimeError("as asked")
        await self.app(scope, receive, send)

app.add_middleware(Raises)
"""
HTTP_ALONE = """
seen = []

@app.middleware("http")
async def count(request, call_next):
    seen.append(request.url.path)
    response = await call_next(request)
    response.headers["x-count"] = str(len(seen))
    return response
"""
# The token says what is answered: a status, or what cannot be sent.
ODD = """
class Odd(Around):
    async def __call__(self, scope, receive, send):
        token = token_of(scope)
        if scope["type"] != "websocket" or token == "good":
            await self.app(scope, receive, send)
            return
        headers = [("x-why", "text")] if token == "text" else []
        status = int(token) if token.isdigit() else 403
        kind = "websocket.http.response"
        await send({"type": kind + ".start", "status": status, "headers": headers})
        await send({"type": kind + ".body", "body": b""})

app.add_middleware(Odd)
"""
WAITS = """
import asyncio

class Waits(Around):
    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            await asyncio.Event().wait()
        await self.app(scope, receive, send)

app.add_middleware(Waits)
"""
PROJECTS = {
    "closes": CLOSES,
    "answers": ANSWERS,
    "adds": ADDS,
    "raises": RAISES,
    "http alone": HTTP_ALONE,
}
# What the servers add themselves.
NOT_COMPARED = {"date", "server", "content-length", "connection", "upgrade", "content-type"}
NOT_COMPARED |= {"sec-websocket-accept", "sec-websocket-extensions"}

Seen = tuple[int, dict[str, str]]


def handshake(port: int, path: str, token: str) -> Seen:
    url, headers = f"ws://127.0.0.1:{port}{path}", {"x-token": token}
    try:
        with connect(url, additional_headers=headers, open_timeout=WAIT_SECONDS) as opened:
            assert opened.response is not None
            return opened.response.status_code, _compared(opened.response.headers.raw_items())
    except InvalidStatus as exc:
        return exc.response.status_code, _compared(exc.response.headers.raw_items())


def post(port: int, token: str) -> Seen:
    """Status and headers of the answer to a JSON-RPC request over HTTP."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).encode()
    headers = {"content-type": "application/json", "x-token": token}
    request = Request(f"http://127.0.0.1:{port}/mcp", body, headers)
    try:
        with urlopen(request, timeout=WAIT_SECONDS) as response:
            return response.status, _compared(response.headers.items())
    except HTTPError as exc:
        with exc:
            return exc.code, _compared(exc.headers.items())


def _compared(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers if name.lower() not in NOT_COMPARED}


def conversation(port: int) -> list[Seen]:
    return [
        *(handshake(port, path, token) for path in ("/ws", "/mcp") for token in ("good", "bad")),
        *(post(port, token) for token in ("good", "bad")),
    ]


@pytest.mark.parametrize("name", PROJECTS)
def test_middleware_sees_what_it_sees_on_upstreams_server(
    serve: StartHost, tmp_path: Path, name: str
) -> None:
    host = serve(app=PROJECT + PROJECTS[name], shards=2, max_sessions=8)
    with uvicorn_serving("app", tmp_path) as port:
        expected = conversation(port)
    with ExitStack() as stack:
        if name == "http alone":  # so that there are two shards
            stack.enter_context(host.open())
            stack.enter_context(host.open())
        assert conversation(host.port) == expected


COUNTS = """
import os
make = Counter.__init__

def made(self, *args, **kwargs):
    with open(os.environ["MADE"], "a") as file:
        file.write("one ")
    make(self, *args, **kwargs)

Counter.__init__ = made
"""


@pytest.mark.parametrize("config", [{"shards": 2}, {"isolate": True}], ids=["shared", "isolated"])
def test_each_handshake_that_middleware_accepts_makes_one_environment(
    start: StartHost, tmp_path: Path, config: dict[str, Any]
) -> None:
    made = tmp_path / "made"
    env = {"MADE": str(made)}
    host = start(app=PROJECT + CLOSES + COUNTS, max_sessions=8, env=env, **config)
    assert any("Closes" in note for note in host.ready()["notes"])
    with ExitStack() as stack:
        for _ in range(6):
            client = stack.enter_context(host.open(additional_headers={"x-token": "good"}))
            assert client.step("count") == "1"
    assert handshake(host.port, "/ws", "bad")[0] == 403
    assert made.read_text().split() == ["one"] * 6


def test_what_middleware_adds_to_a_handshake_reaches_the_client_of_an_isolated_session(
    serve: StartHost,
) -> None:
    chosen = 'message = {**message, "subprotocol": "b", "headers"'
    adds = ADDS.replace('message = {**message, "headers"', chosen)
    host = serve(app=PROJECT + adds, isolate=True, max_sessions=2)
    with host.open(subprotocols=[Subprotocol("a"), Subprotocol("b")]) as client:
        assert client.connection.response is not None
        assert client.connection.response.headers["x-seen"] == "yes"
        assert client.connection.subprotocol == "b"
        assert client.step("count") == "1"


@pytest.mark.parametrize("token", ["419", "499", "520", "text"])
def test_an_answer_of_any_kind_refuses(serve: StartHost, token: str) -> None:
    host = serve(app=PROJECT + ODD)
    status = 500 if token == "text" else int(token)
    assert handshake(host.port, "/ws", token)[0] == status
    assert handshake(host.port, "/ws", "good")[0] == 101


def test_handshakes_that_the_middleware_keeps_count_as_connections(
    serve: StartHost, tmp_path: Path
) -> None:
    python = python_with_few_descriptors(tmp_path, FEW_FDS)
    host = serve(app=PROJECT + WAITS, max_sessions=4, python=python)
    with ExitStack() as stack:
        asked = [stack.enter_context(raw(host)) for _ in range(2 * sessions_of_process(FEW_FDS))]
        for client in asked:
            client.send(HEAD)
        peers = [client.connection for client in asked]
        answered, _, _ = select.select(peers, [], [], WAIT_SECONDS)
        assert answered[0].recv(1000).startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_handshake_may_follow_a_request_on_its_connection(serve: StartHost, shards: int) -> None:
    closes = CLOSES.replace('elif scope["type"] == "http"', "elif False")
    host = serve(app=PROJECT + closes, shards=shards, max_sessions=8)
    with ExitStack() as stack:
        for token, status in [(b"good", b"101"), (b"bad", b"403")] * 3:
            client = stack.enter_context(raw(host))
            client.send(HEALTH)
            head = client.head()
            assert head.startswith(b"HTTP/1.1 200")
            client.read(int(head.partition(b"content-length: ")[2].partition(b"content-type")[0]))
            upgrade = HEAD.replace(b"\r\n\r\n", b"\r\nx-token: " + token + b"\r\n\r\n")
            client.send(upgrade[:30])
            client.send(upgrade[30:])
            assert client.head().startswith(b"HTTP/1.1 " + status)
            if token == b"good":
                client.text(json.dumps({"type": "step", "data": {"what": "count"}}))
                assert client.answer()["data"]["observation"]["text"] == "1"


def test_an_app_whose_middleware_cannot_be_run_around_sessions_is_served_as_it_is(
    start: StartHost,
) -> None:
    without = "app.routes[:] = [r for r in app.routes if r.path != '/ws' and r.path != '/mcp']"
    ready = start(app=PROJECT + without + CLOSES).ready()
    assert ready["serving"] == "as_is"
    assert "cannot be run around sessions" in ready["notes"][0]
