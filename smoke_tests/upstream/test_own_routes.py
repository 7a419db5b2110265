# SPDX-License-Identifier: Apache-2.0
"""What a project has besides sessions, beside upstream's own server in the same Python.

The web interface of a generated project, with several shards; its middleware.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ..conftest import Machine
from .test_upstream import run_upstream

WAIT_SECONDS = 60.0
SESSIONS = 8  # held meanwhile, so that there is more than one shard

GRADIO_CLIENT = """
import sys
from gradio_client import Client

client = Client(sys.argv[1] + "/web/", verbose=False)
named = client.view_api(print_info=False, return_format="dict")["named_endpoints"]
reset = next(name for name in named if "reset" in name)
for _ in range(3):
    assert client.predict(api_name=reset), "no answer"
print("gradio client ok")
"""


MIDDLEWARE = """

class NeedsToken:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        token = dict(scope.get("headers", ())).get(b"x-token")
        if scope["type"] == "websocket" and token != b"good":
            await send({"type": "websocket.close", "code": 4001})
        elif scope["type"] == "http" and scope["path"] == "/mcp" and token != b"good":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)


app.add_middleware(NeedsToken)
"""


def ask(address: str, method: str, path: str, body: Any = None) -> Any:
    """The answer of one request, on a connection of its own."""
    headers = {"content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = Request(address + path, data, headers, method=method)
    with urlopen(request, timeout=WAIT_SECONDS) as response:
        return json.load(response)


def files_of(folder: Path) -> dict[Path, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {path: path.read_bytes() for path in files}


def test_the_web_interface_has_one_environment_with_several_shards(
    machine: Machine, upstream: Path, project: Path
) -> None:
    """The project is served as it is: none of its files is changed by that."""
    before = files_of(project)
    words = ["--shards", "4", "--max-sessions", "16", "-e", "ENABLE_WEB_INTERFACE=true"]
    machine.ok("launch", str(project), *words, timeout=600)
    environment = machine.environment("my_env")
    address = environment["address"]
    with ExitStack() as stack:
        for _ in range(SESSIONS):
            stack.enter_context(connect(f"{address.replace('http', 'ws')}/ws"))
        for _ in range(5):
            ask(address, "POST", "/web/reset", {})
            for _ in range(3):
                ask(address, "POST", "/web/step", {"action": {"message": "hello"}})
            assert ask(address, "GET", "/web/state")["step_count"] == 3
        say = run_upstream(upstream, GRADIO_CLIENT, address, cwd=machine.home, machine=machine)
        assert "gradio client ok" in say
    assert files_of(project) == before


def statuses(address: str) -> list[int]:
    """What is answered to handshakes and to JSON-RPC over HTTP, without the token and with it."""
    found = []
    for token in ("bad", "good"):
        headers = {"x-token": token}
        try:
            url = f"{address.replace('http', 'ws')}/ws"
            with connect(url, additional_headers=headers, open_timeout=WAIT_SECONDS) as opened:
                assert opened.response is not None
                found.append(opened.response.status_code)
        except InvalidStatus as exc:
            found.append(exc.response.status_code)
        body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
        headers["content-type"] = "application/json"
        try:
            with urlopen(Request(f"{address}/mcp", body, headers), timeout=WAIT_SECONDS) as answer:
                found.append(answer.status)
        except HTTPError as exc:
            with exc:
                found.append(exc.code)
    return found


@contextmanager
def upstreams_server(python: Path, folder: Path) -> Iterator[str]:
    """The project served by upstream's own server; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [str(python), "-m", "uvicorn", "my_env.server.app:app", "--log-level", "error"]
        process = subprocess.Popen(
            [*command, "--fd", str(listener.fileno())],
            cwd=folder.parent,
            pass_fds=[listener.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.kill()
            process.wait()


def test_middleware_refuses_what_it_refuses_on_upstreams_server(
    machine: Machine, upstream: Path, project: Path
) -> None:
    app = project / "server" / "app.py"
    app.write_text(app.read_text().replace("\n\ndef main():", MIDDLEWARE + "\n\ndef main():", 1))
    answer = machine.ok("launch", str(project), "--max-sessions", "8", timeout=600)
    assert "NeedsToken" in answer.err
    with upstreams_server(upstream, project) as address:
        expected = statuses(address)
    assert statuses(machine.environment("my_env")["address"]) == expected == [403, 401, 101, 200]
