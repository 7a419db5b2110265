# SPDX-License-Identifier: Apache-2.0
"""Pages in a real browser cannot use the daemon and environments; upstream's client can.

The pages try every kind of request that a page can send, by every name of the servers. A name that
resolves to this machine, as after DNS rebinding, makes the server the page's own origin. The
environment itself counts its calls. The same attempts succeed for a page that is allowed.

Skipped without a Chromium (`chromium.py`).
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .chromium import chromium
from .conftest import Machine

REFUSED = {401, 403, 415}
WITNESS = """
from pathlib import Path
from openenvd import Action, Environment, Observation, State

def note(what):
    with open(Path(__file__).with_name("seen.log"), "a") as log:
        log.write(what + "\\n")

class Sample(Environment[Action, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        note("made")
        self._steps = 0
    def reset(self, seed=None, episode_id=None, **kwargs):
        note("reset")
        return Observation()
    def step(self, action, timeout_s=None, **kwargs):
        note("step")
        self._steps += 1
        return Observation()
    @property
    def state(self):
        return State(step_count=self._steps)
"""
UPSTREAM = """
import asyncio, sys
from openenv import GenericEnvClient

async def use(address):
    async with GenericEnvClient(base_url=address) as env:
        await env.reset()
        await env.step({})
        assert (await env.state())["step_count"] == 1

for address in sys.argv[1:]:
    asyncio.run(use(address))
    with GenericEnvClient(base_url=address).sync() as env:
        env.reset()
        env.step({})
        assert env.state()["step_count"] == 1
"""
ATTEMPTS = Path(__file__).with_name("attempts.js").read_text()
STEP = '{"action": {}}'
RPC = '{"jsonrpc":"2.0","method":"openenv/session/create","id":1}'
ENVIRONMENT = {
    "posts": {"/reset": "{}", "/step": STEP, "/mcp": RPC},
    "gets": ["/state", "/metadata", "/health", "/capacity"],
    "sockets": ["/ws", "/mcp"],
}
DAEMON = {
    "posts": {"/v1/requests": '{"operation":"down","payload":{"name":"open"}}'},
    "gets": ["/v1/status", "/v1/info", "/docs"],
    "sockets": [],
}


@dataclass
class Browser:
    """A headless Chromium for which every `*.example` is this machine."""

    chromium: Any
    pages: str  # the server of empty pages

    def attempt(self, page_origin: str, server: str, attempts: dict[str, Any]) -> Attempts:
        """Open a page of this origin, which sends every kind of request to the server."""
        context = self.chromium.new_context()
        page = context.new_page()
        url = f"{page_origin}/a-page-of-{id(page)}"
        if page_origin == server:  # loaded before the name was rebound
            html = "<!doctype html><body>"
            page.route(url, lambda route: route.fulfill(body=html, content_type="text/html"))
        statuses: list[int] = []

        def note(response: Any) -> None:
            if response.url != url:
                statuses.append(response.status)

        page.on("response", note)
        page.goto(url)
        page.unroute_all()
        tried = page.evaluate(ATTEMPTS, {"server": server, **attempts})
        context.close()
        return Attempts(tried, statuses)


@dataclass
class Attempts:
    """The answers that a page got, and the statuses that the browser saw."""

    tried: dict[str, Any]
    statuses: list[int]

    def all_refused(self) -> bool:
        """Return whether every answer was a refusal.

        For `no-cors` requests only the browser sees the status, not the page.
        """
        seen = {status for status in self.tried.values() if isinstance(status, int) and status}
        return not (seen | set(self.statuses)) - REFUSED and "open" not in self.tried.values()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = [
        "--host-resolver-rules=MAP *.example 127.0.0.1",
        # Newer browsers ask the user before a page may reach this machine; older ones do not.
        "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets",
    ]
    with empty_pages() as pages, chromium(*arguments) as running:
        yield Browser(running, pages)


@contextmanager
def empty_pages() -> Iterator[str]:
    """Another web server, by its port: `:PORT`."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><body>")

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield str(server.server_port)
        server.shutdown()


def test_no_page_of_a_stranger_uses_anything_and_upstreams_client_does(
    machine: Machine,
    browser: Browser,
    upstream: Path,
    write_environment: Callable[[str], str],
    tmp_path: Path,
) -> None:
    source = write_environment(WITNESS)

    def launch(name: str, *options: str) -> str:
        machine.ok("launch", source, "--name", name, *options, cwd=tmp_path)
        return machine.ok("address", name).out.strip()

    def seen() -> list[str]:
        return (tmp_path / "seen.log").read_text().split()

    (tmp_path / "seen.log").touch()
    stranger = f"http://evil.example:{browser.pages}"
    addresses = {
        "open": launch("open"),
        "locked": launch("locked", "--token", "auto"),
        "friendly": launch("friendly", "--allow-origin", stranger),
    }
    daemon = json.loads((machine.home / "daemon.json").read_text())["address"]
    before = seen()
    guarded = [(addresses[name], ENVIRONMENT) for name in ("open", "locked")]
    for base_url, attempts in [*guarded, (daemon, DAEMON)]:
        port = urlsplit(base_url).port
        for name in ("127.0.0.1", "localhost", "evil.example"):
            server = f"http://{name}:{port}"
            # From a page of another origin, and by a rebound name from the server's own origin.
            pages = [stranger, server] if name == "evil.example" else [stranger]
            for page in pages:
                found = browser.attempt(page, server, attempts)
                assert found.all_refused(), (page, server, found)
                assert found.statuses, (page, server, found)
                assert seen() == before, (page, server, found)
    assert {e["state"] for e in machine.status()["environments"]} == {"READY"}
    # The same attempts succeed for an allowed page.
    for page, name in ((stranger, "friendly"), (f"http://localhost:{browser.pages}", "open")):
        before = seen()
        server = f"http://127.0.0.1:{urlsplit(addresses[name]).port}"
        found = browser.attempt(page, server, ENVIRONMENT)
        assert found.tried["json /step"] == 200, found
        assert found.tried["text /step"] == 415, found
        assert found.tried["websocket /ws"] == "open", found
        assert seen().count("step") == before.count("step") + 2, found
    before = seen()
    program = [str(upstream), "-c", UPSTREAM, *addresses.values()]
    subprocess.run(program, check=True, timeout=240)
    assert seen()[len(before) :] == ["made", "reset", "step"] * 2 * len(addresses)
