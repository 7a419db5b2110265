# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs upstream's tests against our server instead of upstream's.

    TestClient(app), ASGITransport(app) ─▶ FastAPI.__call__ ─▶ forwarded over a socket ─┐
    Popen([python, "-m", "uvicorn", APP, …]) ─────────────▶ env_host/__main__.py APP ───┴▶ env host

An app on which an `HTTPEnvServer` has registered its routes gets an env host at its first request:
a fork of the test's own process, which alone has its classes, with supervisor and shard. A test
that looks into the server's memory therefore fails. Sessions are as on upstream's server: not
isolated, with its limit, and refused at once beyond that.

Loaded with `-p suite_on_ours`; `SUITE_REPORT` names the file that gets the number of env hosts.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import websockets
from fastapi import FastAPI
from websockets.asyncio.client import connect

HOST_PROGRAM = Path(__file__).resolve().parents[3] / "env_host" / "__main__.py"
AS_UPSTREAM: dict[str, Any] = {"isolate": False, "admission_timeout_seconds": 0.0, "shards": 1}
DROPPED = {b"host", b"content-length", b"connection", b"transfer-encoding"}
REQUEST_SECONDS = 60.0

_plain_call = FastAPI.__call__
_plain_popen = subprocess.Popen


class EnvHosts:
    """The env hosts of this process, by app."""

    servers: ClassVar[dict[int, tuple[Any, Any]]] = {}  # with the app, so that its id stays unique
    running: ClassVar[dict[int, tuple[int, int]]] = {}  # port and pid
    started = 0
    is_child = False

    @classmethod
    def port_of(cls, app: Any) -> int | None:
        """Return the port of the app's env host; None if it has none, or in the env host itself."""
        if cls.is_child or id(app) not in cls.servers:
            return None
        if id(app) not in cls.running:
            cls.running[id(app)] = cls._start(*cls.servers[id(app)])
        return cls.running[id(app)][0]

    @classmethod
    def _start(cls, app: Any, server: Any) -> tuple[int, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        cls.started += 1
        pid = os.fork()
        if pid == 0:
            cls.is_child = True
            _serve(app, server, listener)
        port = listener.getsockname()[1]
        listener.close()
        return port, pid

    @classmethod
    def stop(cls) -> None:
        for _, pid in cls.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        cls.running.clear()
        cls.servers.clear()


def _serve(app: Any, server: Any, listener: socket.socket) -> None:
    """Run an env host in a fork of the test's process. Does not return."""
    code = 1
    try:
        with contextlib.suppress(Exception):
            asyncio._set_running_loop(None)  # the fork was made within the test's loop
        from openenvd.env_host.environment.upstream_project import _definition
        from openenvd.env_host.ipc.reports import Notifier
        from openenvd.env_host.main import Inputs, _supervise
        from openenvd.schema.protocol import HostConfig

        most = getattr(server, "_max_concurrent_envs", None)
        config = HostConfig(name="suite", max_sessions=most, **AS_UPSTREAM)
        definition = _definition(server, app, app, "suite")
        _supervise(Inputs(config, [listener]), Notifier(None), definition)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


async def _call(self: Any, scope: Any, receive: Any, send: Any) -> None:
    port = None if scope["type"] == "lifespan" else EnvHosts.port_of(self)
    if port is None:
        await _plain_call(self, scope, receive, send)
    elif scope["type"] == "http":
        await _forward_request(port, scope, receive, send)
    else:
        await _forward_session(port, scope, receive, send)


def _target(scope: Any) -> str:
    query = scope["query_string"].decode()
    return f"{scope['path']}?{query}" if query else str(scope["path"])


async def _forward_request(port: int, scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in DROPPED]
    url = f"http://127.0.0.1:{port}{_target(scope)}"
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS) as client:
        answer = await client.request(scope["method"], url, headers=headers, content=body)
    kept = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() not in DROPPED]
    length = (b"content-length", str(len(answer.content)).encode())
    start = {"type": "http.response.start", "status": answer.status_code}
    await send({**start, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": answer.content})


async def _forward_session(port: int, scope: Any, receive: Any, send: Any) -> None:
    await receive()  # the handshake
    try:
        connection = await connect(f"ws://127.0.0.1:{port}{_target(scope)}", max_size=None)
    except websockets.InvalidStatus:
        await send({"type": "websocket.close", "code": 1000})
        return
    await send({"type": "websocket.accept"})
    forwarding = asyncio.create_task(_forward_answers(connection, send))
    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        with contextlib.suppress(websockets.ConnectionClosed):
            await connection.send(message["bytes"] if text is None else text)
    await connection.close()
    await forwarding


async def _forward_answers(connection: Any, send: Any) -> None:
    code = 1005
    try:
        async for text in connection:
            kind = "text" if isinstance(text, str) else "bytes"
            await send({"type": "websocket.send", kind: text})
    except websockets.ConnectionClosed:
        pass
    code = connection.close_code or code
    with contextlib.suppress(Exception):  # the test has closed it itself
        await send({"type": "websocket.close", "code": code})


class _Popen(_plain_popen):  # type: ignore[misc,type-arg,valid-type,unused-ignore]
    """Starts our env host when a test starts uvicorn."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        if not (isinstance(args, list) and args[1:3] == ["-m", "uvicorn"]):
            super().__init__(args, *more, **options)
            return
        EnvHosts.started += 1
        port = int(args[args.index("--port") + 1])
        with socket.create_server(("127.0.0.1", port)) as listener:
            args, options = _env_host_command(args, options, listener.fileno())
            super().__init__(args, *more, **options)
        # Before the env host is ready, its clients wait, while uvicorn's are refused.
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=REQUEST_SECONDS)


def _env_host_command(
    args: list[str], options: dict[str, Any], fd: int
) -> tuple[list[str], dict[str, Any]]:
    from openenvd.schema.protocol import HOST_CONFIG_VARIABLE, LISTEN_FD_VARIABLE, HostConfig

    paths = (os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    config = HostConfig(name="suite", app_candidates=(args[3],), import_paths=paths, **AS_UPSTREAM)
    own = {HOST_CONFIG_VARIABLE: json.dumps(config.to_json()), LISTEN_FD_VARIABLE: str(fd)}
    environ = {**(options.get("env") or os.environ), **own}
    return [args[0], "-P", str(HOST_PROGRAM)], {**options, "env": environ, "pass_fds": (fd,)}


def pytest_configure() -> None:
    spec = importlib.util.spec_from_file_location("openenvd_program", HOST_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.make_package_known()
    server_class = importlib.import_module("openenv.core.env_server.http_server").HTTPEnvServer
    register = server_class.register_routes

    def note(self: Any, app: Any, *args: Any, **kwargs: Any) -> Any:
        EnvHosts.servers[id(app)] = (app, self)
        return register(self, app, *args, **kwargs)

    server_class.register_routes = note
    FastAPI.__call__ = _call  # type: ignore[method-assign,unused-ignore]
    subprocess.Popen = _Popen  # type: ignore[misc,unused-ignore]


@pytest.fixture(autouse=True)
def env_hosts() -> Any:
    yield
    EnvHosts.stop()


def pytest_sessionfinish() -> None:
    if report := os.environ.get("SUITE_REPORT"):
        Path(report).write_text(str(EnvHosts.started))
