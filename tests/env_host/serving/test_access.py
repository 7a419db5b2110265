# SPDX-License-Identifier: Apache-2.0
"""Strangers are refused on every route and handshake, before anything of the environment runs."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from openenvd.env_host.serving.access import JSON_ROUTES
from openenvd.schema import protocol

from ..hosts import WAIT_SECONDS, Client, Host, serving
from ..raw import UPGRADE
from ..samples import PLAIN

TOKEN = "a-token-of-the-tests"
WITNESS = """
import os
from pathlib import Path
from plain import Bare, Seen

def note(what):
    with (Path(__file__).parent / "seen.log").open("a") as log:
        log.write(what + "+token" * ("a-token-of-the-tests" in str(os.environ)) + "\\n")

class Witness(Bare):
    RESET_FIRST = True
    def __init__(self):
        note("made")
    def reset(self, **kwargs):
        note("reset")
        return Seen()
    def step(self, action, **kwargs):
        note("step")
        return Seen()
"""
APP = """
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import PlainTextResponse
from fastapi.middleware.cors import CORSMiddleware
from witness import note

app = FastAPI()
app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])

@app.websocket("/ws")
@app.websocket("/mcp")
async def session(socket: WebSocket):
    note("session")
    await socket.accept()
    await socket.receive_text()
    await socket.send_text('{"type": "observation"}')
    await socket.close()

@app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
async def anything(path: str, request: Request):
    note(path)
    await request.body()
    return PlainTextResponse(str(request.url.query))
"""
ROUTES = [
    *(("GET", f"/{name}") for name in ("", "health", "metadata", "schema", "state", "capacity")),
    *(("GET", f"/{name}") for name in ("metrics", "list_environments", "web", "docs", "none")),
    *(("POST", f"/{name}") for name in ("reset", "step", "mcp", "web/step", "none")),
    ("OPTIONS", "/step"),
    ("PUT", "/step"),
]
HANDSHAKES = ["/ws", "/mcp", "/ws?session_id=1", "/none"]
WHOSE = {
    protocol.ENVIRONMENT_HEADER: "w",
    protocol.GENERATION_HEADER: "launch",
    protocol.REPLICA_HEADER: "w-0-launch",
}
STRANGERS: dict[str, list[tuple[str, str]]] = {
    "rebound": [("Host", "evil.example:{port}")],
    "rebound with a loopback origin": [("Host", "evil.example"), ("Origin", "http://localhost")],
    "rebound page": [("Host", "evil.example"), ("Origin", "http://evil.example")],
    "foreign page": [("Host", "localhost:{port}"), ("Origin", "http://evil.example")],
    "page without an origin": [("Host", "127.0.0.1:{port}"), ("Origin", "null")],
    "no host": [],
    "empty host": [("Host", "")],
    "two hosts": [("Host", "localhost"), ("Host", "evil.example")],
    "two hosts, the other way": [("Host", "evil.example"), ("Host", "localhost")],
    "two origins": [
        ("Host", "localhost"),
        ("Origin", "http://localhost"),
        ("Origin", "http://evil.example"),
    ],
    "an image of a foreign page": [("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")],
}


@dataclass
class Answer:
    """What was answered."""

    status: int
    headers: Message
    body: bytes


@dataclass
class Served:
    """A host, and what its environment has noted."""

    host: Host
    folder: Path

    def seen(self) -> list[str]:
        path = self.folder / "seen.log"
        return path.read_text().split() if path.exists() else []

    def ask(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes | None = None
    ) -> Answer:
        """Send exactly these headers, and return the answer, read to its end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.host.port, timeout=WAIT_SECONDS)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value.format(port=self.host.port))
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers, response.read())
        connection.close()
        return answer

    def status(self, method: str, path: str, *headers: tuple[str, str], body: Any = None) -> int:
        return self.ask(method, path, [("Host", "localhost"), *headers], body).status


@contextmanager
def serving_witness(folder: Path, *, as_is: bool = False, **config: Any) -> Iterator[Served]:
    """A host of `Witness`, or of a project's app."""
    (folder / "witness.py").write_text(WITNESS)
    (folder / "plain.py").write_text(PLAIN)
    (folder / "app.py").write_text(APP)
    what = {"env_class": None if as_is else "witness:Witness", "serve_as_is": as_is}
    config = {"shards": 1, "admission_timeout_seconds": 0.0, "headers": WHOSE, **what, **config}
    apps = ("app:app",) if as_is else ()
    told = protocol.HostConfig(name="w", app_candidates=apps, import_paths=(str(folder),), **config)
    with serving(told, folder) as host:
        yield Served(host, folder)


KINDS: dict[str, Any] = {"class": {}, "isolate": {"isolate": True}, "as-is": {"as_is": True}}


def hosts_of(*kinds: str, **config: Any) -> Any:
    """A fixture: a host of each of these kinds."""

    @pytest.fixture(scope="module", params=kinds)
    def found(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Served]:
        with serving_witness(
            tmp_path_factory.mktemp("w"), **KINDS[request.param], **config
        ) as made:
            yield made

    return found


served = hosts_of(*KINDS)
locked = hosts_of(*KINDS, token=TOKEN)
project = hosts_of("as-is")


@pytest.mark.parametrize("stranger", list(STRANGERS))
def test_a_stranger_is_refused_on_every_route_and_nothing_runs(
    served: Served, stranger: str
) -> None:
    before = served.seen()
    headers = STRANGERS[stranger]
    for method, path in ROUTES:
        for kind in ("application/json", "text/plain"):
            given = [*headers, ("Content-Type", kind)]
            answer = served.ask(method, path, given, b'{"action": {}}')
            assert answer.status == 403, (method, path)
            assert answer.headers["Access-Control-Allow-Origin"] is None
    for path in HANDSHAKES:
        assert served.ask("GET", path, [*headers, *UPGRADE.items()]).status in (400, 403), path
    assert served.seen() == before
    if stranger == "rebound page":
        assert "Host 'evil.example'" in json.loads(answer.body)["detail"]
        assert "--allow-origin" in json.loads(answer.body)["detail"]


@pytest.mark.parametrize("header", WHOSE)
def test_a_request_for_another_server_is_refused_on_every_route_and_nothing_runs(
    served: Served, header: str
) -> None:
    before = served.seen()
    own = [("Host", "localhost"), ("Content-Type", "application/json"), *WHOSE.items()]
    other = [(name, "another" if name == header else value) for name, value in own]
    for method, path in ROUTES:
        answer = served.ask(method, path, other, b'{"action": {}}')
        assert (answer.status, answer.headers[protocol.RETRY_HEADER]) == (503, "1"), (method, path)
        assert "asks for another, and" in json.loads(answer.body)["detail"]
    for path in HANDSHAKES:
        answer = served.ask("GET", path, [*other, *UPGRADE.items()])
        assert (answer.status, answer.headers[protocol.RETRY_HEADER]) == (503, "1"), path
    assert served.seen() == before
    assert served.ask("GET", "/health", own).status == 200
    with connect(f"ws://localhost:{served.host.port}/ws", additional_headers=WHOSE) as client:
        client.send('{"type":"reset"}')
        assert json.loads(client.recv(WAIT_SECONDS))["type"] == "observation"


def test_a_second_request_of_a_connection_is_checked_too(served: Served) -> None:
    connection = http.client.HTTPConnection("localhost", served.host.port, timeout=WAIT_SECONDS)
    for headers, expected in (({}, 200), ({"Origin": "http://evil.example"}, 403), ({}, 200)):
        connection.request("GET", "/health", headers=headers)
        with connection.getresponse() as response:
            response.read()
            assert response.status == expected
    connection.request("GET", "/ws", headers={**UPGRADE, "Origin": "http://evil.example"})
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "evil.example", 403),
        ("http://evil.example/health", "evil.example", 403),
        ("http://evil.example/health", "localhost", 200),
    ],
)
def test_a_target_that_names_a_host_does_not_stand_for_the_header(
    project: Served, target: str, host: str, status: int
) -> None:
    assert project.ask("GET", target, [("Host", host)]).status == status


def test_what_is_pipelined_behind_a_refused_handshake_is_not_run(served: Served) -> None:
    head = "GET /ws HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
    before, text = served.seen(), b'{"type":"reset"}'
    with socket.create_connection(("127.0.0.1", served.host.port), WAIT_SECONDS) as connection:
        frame = bytes((0x81, 0x80 | len(text), 0, 0, 0, 0)) + text
        connection.sendall(head.encode() + b"\r\n" + frame)
        assert connection.recv(65536).startswith(b"HTTP/1.1 403 ")
    assert served.seen() == before


def test_refused_handshakes_take_no_slot(tmp_path: Path) -> None:
    with serving_witness(tmp_path, max_sessions=1) as served:
        for _ in range(64):
            headers = [("Host", "localhost"), ("Origin", "http://evil.example"), *UPGRADE.items()]
            assert served.ask("GET", "/ws", headers).status == 403
            headers = [("Host", "localhost"), ("Content-Type", "text/plain")]
            body = b'{"jsonrpc":"2.0","method":"openenv/session/create","id":1}'
            assert served.ask("POST", "/mcp", headers, body).status == 415
        with served.host.open() as client:
            assert client.ask("reset")["type"] == "observation"


@pytest.mark.parametrize("path", sorted(JSON_ROUTES))
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json"],
)
def test_a_route_that_takes_json_takes_nothing_else(project: Served, path: str, kind: str) -> None:
    before, body = project.seen(), b'{"action": {}}'
    assert project.status("POST", path, ("Content-Type", kind), body=body) == 415
    assert project.status("POST", path, body=body) == 415
    assert project.seen() == before
    for said in ("application/json", "Application/JSON; charset=utf-8"):
        assert project.status("POST", path, ("Content-Type", said), body=body) == 200


LINK = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/reset", [], None, 200),
        ("POST", "/reset", [], b"", 200),
        ("POST", "/reset", [("Transfer-Encoding", "chunked")], None, 415),
        ("GET", "/health", [*LINK, ("Sec-Fetch-Dest", "document")], None, 200),
        ("GET", "/health", [*LINK, ("Sec-Fetch-Dest", "iframe")], None, 403),
    ],
    ids=["no body", "empty body", "body without a type", "link of another page", "frame of one"],
)
def test_what_else_is_allowed(
    served: Served,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    body: bytes | None,
    status: int,
) -> None:
    assert served.status(method, path, *headers, body=body) == status


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://lab.example"])
def test_an_allowed_page_may_ask_and_read(tmp_path: Path, origin: str) -> None:
    with serving_witness(tmp_path, allow_origin=["https://lab.example"]) as served:
        use_as_page(served, origin)


def use_as_page(served: Served, origin: str) -> None:
    page = ("Origin", origin)
    url = f"ws://localhost:{served.host.port}/ws"
    asked = [("Host", "localhost"), page, ("Access-Control-Request-Method", "POST")]
    asked += [("Access-Control-Request-Headers", "content-type,authorization")]
    answer = served.ask("OPTIONS", "/step", [*asked])
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Origin"] == origin
    assert answer.headers["Access-Control-Allow-Headers"] == "content-type,authorization"
    assert answer.headers["Vary"] == "origin"
    json_body = ("Content-Type", "application/json")
    answer = served.ask("POST", "/reset", [("Host", "localhost"), page, json_body], b"{}")
    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, origin)
    refused = served.ask("POST", "/reset", [("Host", "localhost"), page], b"{}")
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (415, origin)
    with connect(url, origin=Origin(origin)) as client:
        client.send('{"type":"reset"}')
        assert json.loads(client.recv(WAIT_SECONDS))["type"] == "observation"


def test_a_project_that_says_who_may_read_is_not_contradicted(project: Served) -> None:
    headers = [("Host", "localhost"), ("Origin", "http://localhost:3000")]
    answer = project.ask("GET", "/anything", headers)
    assert answer.headers.get_all("Access-Control-Allow-Origin") == ["*"]


def test_an_environment_of_all_addresses_is_called_by_any_address_but_by_no_name(
    tmp_path: Path,
) -> None:
    with serving_witness(tmp_path, host="0.0.0.0", allow_origin=["https://lab.example"]) as served:
        for host, status in (("192.168.1.5", 200), ("lab.example", 200), ("evil.example", 403)):
            assert served.ask("GET", "/health", [("Host", host)]).status == status
        page = ("Origin", "http://192.168.1.5:21000")
        for host, status in (("192.168.1.5:21000", 200), ("192.168.1.5", 403)):
            assert served.ask("GET", "/health", [("Host", host), page]).status == status


# With a token


@pytest.mark.parametrize(
    "sent",
    [
        *({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}),
        *({"query": "wrong"}, {"query": TOKEN[:-1]}, {"query": ""}),
    ],
)
def test_without_the_token_nothing_runs(locked: Served, sent: Mapping[str, str]) -> None:
    before = locked.seen()
    query = f"?token={sent['query']}" if "query" in sent else ""
    headers = [("Host", "localhost"), *((k, v) for k, v in sent.items() if k != "query")]
    for method, path in ROUTES:
        answer = locked.ask(method, path + query, [*headers, ("Content-Type", "text/plain")])
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
    for path in ("/ws", "/mcp"):
        answer = locked.ask("GET", path + query, [*headers, *UPGRADE.items()])
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), path
    assert locked.seen() == before


def test_the_token_passes_and_is_in_no_variable_log_or_command_line(locked: Served) -> None:
    assert locked.status("GET", "/health", ("Authorization", f"Bearer {TOKEN}")) == 200
    assert locked.status("GET", f"/health?token={TOKEN}") == 200
    assert locked.status("GET", f"/?token={TOKEN}/health") == 200
    assert locked.status("GET", f"/health?token={TOKEN}", ("Authorization", "Basic own")) == 200
    page = [("Origin", "http://localhost:3000"), ("Access-Control-Request-Method", "POST")]
    assert locked.status("OPTIONS", "/step", *page) == 204  # which is asked before it is sent
    headers = [("Content-Type", "application/json"), ("Authorization", f"Bearer {TOKEN}")]
    assert locked.status("POST", "/step", *headers, body=b'{"action": {}}') == 200
    assert locked.seen()[-1] == "step"
    with pytest.raises(InvalidStatus):
        connect(f"ws://localhost:{locked.host.port}/ws?token={TOKEN}x")
    locked.ask("GET", f"/none?token={TOKEN}", [("Host", "localhost")])
    assert TOKEN not in locked.host.log.read_text()
    assert TOKEN not in Path(f"/proc/{locked.host.process.pid}/cmdline").read_text()


@pytest.mark.parametrize("path", ["/?token={}/ws", "/ws?token={}", "/?token={}%2Fws&a=b"])
def test_a_session_may_have_its_token_in_the_base_url(locked: Served, path: str) -> None:
    url = f"ws://localhost:{locked.host.port}{path.format(TOKEN)}"
    with Client(url) as client:
        client.connection.send('{"type": "reset"}')
        assert client.receive()["type"] == "observation"


def test_a_project_does_not_see_the_token_in_its_queries(project: Served) -> None:
    answer = project.ask("GET", f"/x?a=1&token={TOKEN}&b=2", [("Host", "localhost")])
    assert answer.body == b"a=1&b=2"
