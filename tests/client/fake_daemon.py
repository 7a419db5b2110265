# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server over a real Unix socket that speaks the API's shapes.

It holds `daemon.lock` and writes `daemon.json` as the daemon does, so that clients and commands
find it by themselves. What it answers is scripted by the test: `answers[method, path]`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from openenvd import __version__
from openenvd.schema.settings import Paths
from openenvd.system.files import installation

Json = dict[str, Any]
Answer = Json | tuple[int, Json] | Callable[["Call"], None]
TOKEN = "a-token-of-the-tests"


class Call(BaseHTTPRequestHandler):
    """One call; a scripted answer may write to it as it likes."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def handle_call(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body: Json | None = json.loads(self.rfile.read(length)) if length else None
        url = urlsplit(self.path)
        fake = self.server.fake
        fake.calls.append((self.command, self.path, self.body))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.json(401, {"error": {"kind": "unauthorized", "message": "no token"}})
            return
        answer = fake.answers.get((self.command, url.path))
        if answer is None:
            error = {"kind": "not_found", "message": f"nothing at {url.path}", "hint": None}
            self.json(404, {"error": {**error, "near": []}})
        elif callable(answer):
            answer(self)
        elif isinstance(answer, tuple):
            self.json(*answer)
        else:
            self.json(200, answer)

    do_GET = do_POST = handle_call  # noqa: N815  # the names that http.server looks for

    def json(self, status: int, value: Json) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def begin_stream(self, content_type: str = "text/event-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, event_id: str, name: str, data: Json) -> None:
        self.chunk(f"id: {event_id}\nevent: {name}\ndata: {json.dumps(data)}\n\n")

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def break_off(self) -> None:
        """Close in the middle of a stream, as a killed daemon does."""
        self.close_connection = True

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as the base has it
        pass


class FakeServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = False
    block_on_close = True
    fake: FakeDaemon

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that left is part of the tests


class FakeDaemon:
    """Scripted answers, and what was asked."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.answers: dict[tuple[str, str], Answer] = {}
        self.calls: list[tuple[str, str, Json | None]] = []
        self.identity: Json = {
            "pid": os.getpid(),
            "pid_started_at": 0.0,
            "version": __version__,
            "installation": installation.mark(),
            "address": "http://127.0.0.1:8585",
            "port": 8585,
            "socket": str(paths.socket),
            "home": str(paths.home),
            "started_at": time.time(),
        }

    def get(self, path: str, answer: Answer) -> None:
        self.answers["GET", path] = answer

    def post(self, path: str, answer: Answer) -> None:
        self.answers["POST", path] = answer

    def write_identity(self, **changes: Any) -> None:
        self.identity.update(changes)
        self.paths.daemon_file.write_text(json.dumps(self.identity))

    def ends(self, request: Json, *log: str) -> None:
        """The request is known, and its stream tells these log pieces and this end."""
        path = f"/v1/requests/{request['id']}"

        def stream(call: Call) -> None:
            call.begin_stream()
            call.event("1:0", "state", {**request, "state": "RUNNING", "error": None})
            if "logs=false" not in call.path:
                for number, text in enumerate(log):
                    call.event(f"1:{number + 1}", "log", {"text": text})
            call.event("2:9", "state", request)
            call.end_stream()

        self.get(path, {"request": request})
        self.get(f"{path}/events", stream)


@contextmanager
def serving(paths: Paths) -> Iterator[FakeDaemon]:
    """A fake daemon that answers, until the block ends; no thread of it is left."""
    paths.sockets.mkdir(parents=True, exist_ok=True)
    paths.token.write_text(TOKEN + "\n")
    fake = FakeDaemon(paths)
    lock = os.open(paths.daemon_lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    paths.socket.unlink(missing_ok=True)
    with FakeServer(str(paths.socket), Call) as server:
        server.fake = fake
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake daemon")
        thread.start()
        fake.write_identity()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
            paths.daemon_file.unlink(missing_ok=True)
            os.close(lock)
    paths.socket.unlink(missing_ok=True)


def new_request(request_id: str = "7f3a91c2d4e5f607", **changes: Any) -> Json:
    """A request's JSON as the API tells it: a launch that succeeded, unless `changes` say else."""
    base: Json = {
        "id": request_id,
        "operation": "launch",
        "label": "launch trial",
        "state": "SUCCEEDED",
        "schedule": "LONG",
        "environment": "trial",
        "priority": 0,
        "payload": {},
        "attempts": 1,
        "max_attempts": 3,
        "lost_daemons": 0,
        "created_at": 1000.0,
        "started_at": 1001.0,
        "finished_at": 1003.0,
        "cancel_requested_at": None,
        "worker": "long-1",
        "timeout_seconds": None,
        "peak_bytes": None,
        "result": None,
        "pending_reason": None,
        "error": None,
    }
    return {**base, **changes}


def new_environment(name: str = "trial", **changes: Any) -> Json:
    """An environment's JSON: READY with one replica, unless `changes` say else."""
    replica = {
        "id": f"{name}-0",
        "ordinal": 0,
        "state": "READY",
        "pid": 4242,
        "sessions": 3,
        "restarts": 0,
        "exit": None,
        "message": None,
    }
    base: Json = {
        "name": name,
        "state": "READY",
        "generation": 1,
        "address": "http://127.0.0.1:21000",
        "sessions": 3,
        "max_sessions": 64,
        "provider": "local",
        "source": "echo",
        "request_id": "7f3a91c2d4e5f607",
        "created_at": 1000.0,
        "error": None,
        "replicas": [replica],
    }
    return {**base, **changes}
