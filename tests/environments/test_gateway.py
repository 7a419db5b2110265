# SPDX-License-Identifier: Apache-2.0
"""The gateway: the real Envoy below a real shim, before small servers that stand for replicas."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve, unix_serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.http11 import Request, Response

from openenvd.environments.gateway import configuration, envoy, process
from openenvd.environments.gateway.configuration import Backend, Endpoint, GatewayOptions
from openenvd.environments.gateway.envoy import BackendFiles, Connections, endpoint_statuses
from openenvd.environments.gateway.process import Gateway
from openenvd.environments.run_files import all_of
from openenvd.environments.shim.client import ShimClient
from openenvd.environments.shim.files import RUN_FILE_NAME
from openenvd.schema.errors import GatewayFailed, PortInUse
from openenvd.schema.layout import Layout
from openenvd.schema.protocol import (
    ENVIRONMENT_HEADER,
    GENERATION_HEADER,
    REPLICA_HEADER,
    RETRY_HEADER,
    HostConfig,
)
from openenvd.system.files.installation import install_command
from openenvd.system.net.websocket import (
    BINARY,
    CLOSE,
    TEXT,
    close_payload,
    frame_head,
    unmasked_client_frame,
    upgrade_request,
)
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.process.tree import wait_until_dead

from ..env_host.hosts import Host

TOKEN = "a-token.of_16~letters"
ECHO = "openenvd.env_host.bundled.echo.environment:EchoEnvironment"
ANY_PORT = GatewayOptions("127.0.0.1", 0)
LONG_BYTES = 8_000_000  # more than the buffers on the way take
TLS = Path(__file__).with_name("tls")
KEY = str(TLS / "key.pem")
WAIT_SECONDS = 20.0
START_SECONDS = 90.0  # of 400 sessions at once, on a busy machine
MAX_UNEVEN = 0.05
NOBODY = 65534


class Replica:
    """A server that answers as a replica does, and says which it is."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.is_full = self.is_ill = False
        self.delay_seconds = 0.0  # of its answer to a handshake
        self.handshakes: list[Headers] = []
        self.health_checks: list[Headers] = []
        self.endpoint: Endpoint
        self._server: Server

    async def start(self, port: int = 0, path: Path | None = None) -> None:
        if path is not None:
            self._server = await unix_serve(self._talk, str(path), process_request=self._answer)
            return
        self._server = await serve(self._talk, "127.0.0.1", port, process_request=self._answer)
        port = next(iter(self._server.sockets)).getsockname()[1]
        self.endpoint = Endpoint(self.ordinal, "127.0.0.1", port)

    async def stop(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.startswith("/capacity"):
            self.health_checks.append(request.headers)
            return connection.respond(503 if self.is_ill else 200, "{}")
        is_handshake = "upgrade" in request.headers
        if is_handshake:
            self.handshakes.append(request.headers)
            await asyncio.sleep(self.delay_seconds)
        if is_handshake and self.is_full:
            refusal = connection.respond(429, "full")
            refusal.headers[RETRY_HEADER] = "1"
            return refusal
        return None if is_handshake else connection.respond(200, f"{self.ordinal} {request.path}")

    async def _talk(self, connection: ServerConnection) -> None:
        async for message in connection:
            if message == "die":
                connection.transport.abort()
            elif isinstance(message, bytes):  # what to send, as it is, before the end
                connection.transport.write(message)
                await asyncio.sleep(0.05)  # Envoy reads it, before a reset could overtake it
                connection.transport.abort()
            elif message == "long":
                await connection.send("x" * LONG_BYTES)
                left = close_payload(1001, "leaving")
                connection.transport.write(frame_head(len(left), CLOSE) + left)
                connection.transport.close()  # once all is sent
                return
            await connection.send(f"{self.ordinal} {message!r}")


@pytest.fixture
def gateway(layout: Layout) -> Iterator[Gateway]:
    yield process.ensure_running(layout, ANY_PORT)
    process.stop(layout)


@pytest.fixture
async def many() -> AsyncIterator[list[Replica]]:
    made = [Replica(ordinal) for ordinal in range(8)]
    for replica in made:
        await replica.start()
    yield made
    for replica in made:
        await replica.stop()


@pytest.fixture
def replicas(many: list[Replica]) -> list[Replica]:
    return many[:2]


@pytest.fixture
def one(many: list[Replica]) -> Replica:
    return many[0]


async def put_behind(
    gateway: Gateway,
    *replicas: Replica | Endpoint,
    token: str | None = None,
    name: str = "sample",
    holding_socket: str | None = None,
) -> str:
    """Put an environment with these replicas behind the gateway; its address."""
    endpoints = tuple(r.endpoint if isinstance(r, Replica) else r for r in replicas)
    backend = Backend(name, endpoints, token, holding_socket=holding_socket)
    await asyncio.to_thread(BackendFiles(gateway.config_folder).write, [backend])
    await seen(gateway, {each.address: each.is_draining for each in endpoints})
    return gateway.options.address_of(name)


async def seen(gateway: Gateway, wanted: dict[str, bool]) -> None:
    """Return when Envoy has these endpoints and no others; whether they drain."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = await asyncio.to_thread(endpoint_statuses, gateway.admin_socket)
            if {e.address: e.is_draining for e in found if e.is_healthy} == wanted:
                return
            await asyncio.sleep(0.01)


async def begin(address: str, **options: Any) -> ClientConnection:
    return await connect(
        f"{address.replace('http', 'ws', 1)}/ws", **{"open_timeout": START_SECONDS, **options}
    )


async def begin_raw(
    gateway: Gateway, address: str, message: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.options.port)
    path = f"{address.removeprefix(gateway.options.address)}/ws"
    writer.write(upgrade_request(f"127.0.0.1:{gateway.options.port}", path))
    await reader.readuntil(b"\r\n\r\n")
    writer.write(message)
    return reader, writer


async def replica_of(session: ClientConnection) -> int:
    await session.send("hello")
    return int(str(await session.recv()).split()[0])


async def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Ask for a page; status 0 where nobody listens."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, headers=given, method=method)

    def send() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()
        except urllib.error.URLError as exc:
            return 0, str(exc)

    return await asyncio.to_thread(send)


async def test_a_session_reaches_its_environment_by_path_and_says_for_whom_it_is(
    gateway: Gateway, one: Replica
) -> None:
    """A replica that is another by now refuses it; the host is the one that the client named."""
    known = replace(one.endpoint, generation="7f", replica="sample_2-0-7f")
    address = await put_behind(gateway, known, name="sample_2")
    async with await begin(address) as session:
        assert await replica_of(session) == 0
    [sent] = one.handshakes
    named = [sent[name] for name in (ENVIRONMENT_HEADER, GENERATION_HEADER, REPLICA_HEADER)]
    assert named == ["sample_2", "7f", "sample_2-0-7f"]
    assert sent["host"] == f"127.0.0.1:{gateway.options.port}"
    assert await ask(f"{address}/health?a=1") == (200, "0 /health?a=1")
    assert (await ask(f"{address}2/health"))[0] == 404
    status, body = await ask(f"{gateway.options.address}/envs/sample/health")
    assert (status, json.loads(body)["detail"]) == (404, "no environment has this address")


async def crowd(address: str, clients: int) -> list[ClientConnection]:
    async with asyncio.TaskGroup() as group:
        begun = [group.create_task(begin(address)) for _ in range(clients)]
    return [task.result() for task in begun]


async def close(sessions: list[ClientConnection]) -> None:
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            group.create_task(session.close())


async def test_a_crowd_is_split_evenly(gateway: Gateway, replicas: list[Replica]) -> None:
    replicas[0].delay_seconds = 0.05  # slow to answer: it would look empty by counts
    address = await put_behind(gateway, *replicas)
    sessions = await crowd(address, 400)
    split = [await replica_of(session) for session in sessions]
    assert abs(split.count(0) - 200) <= 200 * MAX_UNEVEN
    await close(sessions)


async def test_the_one_of_many_that_has_room_is_found(
    gateway: Gateway, many: list[Replica]
) -> None:
    address = await put_behind(gateway, *many)
    for replica in many:
        replica.is_full = replica is not many[5]
    sessions = [*await crowd(address, 64), *[await begin(address) for _ in range(16)]]
    assert {await replica_of(session) for session in sessions} == {5}
    await close(sessions)


async def test_a_replica_that_is_known_to_be_full_is_asked_only_where_all_are(
    gateway: Gateway, many: list[Replica]
) -> None:
    full = [replace(each.endpoint, is_full=True) for each in many]
    address = await put_behind(gateway, *full[:-1], many[-1])
    sessions = await crowd(address, 32)
    assert {await replica_of(session) for session in sessions} == {7}
    assert not any(each.handshakes for each in many[:-1])
    session = "01234567-0123-4123-a123-000000010002"  # and its sessions go on
    assert (await ask(f"{address}/x?session_id={session}"))[1][0] == "0"
    await put_behind(gateway, *full)
    sessions += await crowd(address, 32)
    assert len({await replica_of(session) for session in sessions}) == len(many)
    await close(sessions)


async def test_a_full_replica_is_passed_over(gateway: Gateway, replicas: list[Replica]) -> None:
    address = await put_behind(gateway, *replicas)
    replicas[0].is_full = True
    more = [await begin(address) for _ in range(12)]
    assert {await replica_of(session) for session in more} == {1}
    assert any(headers["x-envoy-attempt-count"] == "2" for headers in replicas[1].handshakes)
    assert all(headers["openenvd-attempts"] == "2" for headers in replicas[1].handshakes)
    replicas[1].is_full = True
    with pytest.raises(InvalidStatus, match="429"):
        await begin(address)
    await close(more)


async def test_sessions_that_end_harm_no_replica(gateway: Gateway, replicas: list[Replica]) -> None:
    address = await put_behind(gateway, *replicas)
    sessions = [await begin(address) for _ in range(20)]
    ended = [session for session in sessions if await replica_of(session) == 0]
    await close(ended)
    more = [await begin(address) for _ in range(20)]
    assert 0 in [await replica_of(session) for session in more]
    await close(sessions + more)
    for ordinal in (0, 1) * 4:
        session_id = f"01234567-0123-4123-a123-{ordinal:04x}00010002"
        _, answer = await ask(f"{address}/x?session_id={session_id}")
        assert answer[0] == f"{ordinal}"
    await replicas[0].stop()
    for _ in range(8):
        async with await begin(address) as session:
            assert await replica_of(session) == 1


async def test_replicas_that_are_ill_get_no_session_when_few_others_are_left(
    gateway: Gateway, many: list[Replica]
) -> None:
    *ill, last = [each.endpoint for each in many]
    for replica in many[:-1]:
        replica.is_ill = True
    backend = Backend("sample", (*ill, last))
    await asyncio.to_thread(BackendFiles(gateway.config_folder).write, [backend])
    await seen(gateway, {last.address: False})
    sessions = [await begin(gateway.options.address_of("sample")) for _ in range(16)]
    assert not any(replica.handshakes for replica in many[:-1])
    await close(sessions)


@pytest.fixture
async def served(gateway: Gateway, tmp_path: Path) -> AsyncIterator[tuple[int, int]]:
    config = HostConfig(name="sample", env_class=ECHO, shards=1, token=TOKEN)
    host = Host(config, tmp_path)
    await asyncio.to_thread(host.ready)
    backend = Backend("sample", (Endpoint(0, "127.0.0.1", host.port),), TOKEN)
    await asyncio.to_thread(BackendFiles(gateway.config_folder).write, [backend])
    await seen(gateway, {f"127.0.0.1:{host.port}": False})
    yield host.port, gateway.options.port
    await asyncio.to_thread(host.close)


@pytest.mark.parametrize(
    "headers",
    [
        f"authorization: Bearer {TOKEN}\r\nauthorization: Bearer {TOKEN}",
        f"authorization: x\r\nAuthorization: Bearer {TOKEN}",
        f'authorization: Digest a="b,c", d=e\r\nauthorization: Bearer {TOKEN}',
        "origin: http://localhost\r\norigin: http://elsewhere.example",
        "host: localhost",
    ],
)
@pytest.mark.parametrize("query", ["", f"?token={TOKEN}"])
async def test_a_header_that_comes_twice_is_refused_as_at_an_environment(
    served: tuple[int, int], headers: str, query: str
) -> None:
    if "uthorization" not in headers:
        headers += f"\r\nauthorization: Bearer {TOKEN}"
    for port, path in zip(served, ("/health", "/envs/sample/health"), strict=True):
        request = f"GET {path}{query} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{request}\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 403 "), (port, answer)


async def test_a_header_has_quotes_and_no_replica_is_told(gateway: Gateway, one: Replica) -> None:
    address = await put_behind(gateway, one)
    digest = 'Digest username="a", qop="auth,auth-int",nc=1'
    assert (await ask(f"{address}/health", authorization=digest))[0] == 200
    await one.stop()
    session = asyncio.create_task(begin(address))
    await asyncio.sleep(0.6)  # by then the daemon has written it, unless it is busy
    await one.start(one.endpoint.port)
    async with await session as opened:
        assert await replica_of(opened) == one.ordinal
    lost = await begin(address)
    await one.stop()
    with pytest.raises(ConnectionClosed):
        await replica_of(lost)
    with pytest.raises(InvalidStatus, match="503") as caught:
        await begin(address)
    told = json.loads(caught.value.response.body or b"")
    assert "no replica of this environment could be reached" in told["detail"]
    assert "onnect" in told["cause"]


async def test_endpoints_are_rolled_and_no_session_ends(
    gateway: Gateway, replicas: list[Replica]
) -> None:
    old, new = [each.endpoint for each in replicas]
    address = await put_behind(gateway, old)
    first = await begin(address)
    draining = Endpoint(old.number, old.host, old.port, is_draining=True)
    await put_behind(gateway, draining, new)
    second = [await begin(address) for _ in range(4)]
    assert {await replica_of(session) for session in second} == {1}
    assert await replica_of(first) == 0
    await put_behind(gateway, new)
    await put_behind(gateway, new, token=TOKEN)  # another cluster, by its health check
    assert await replica_of(first) == 0
    assert {await replica_of(session) for session in second} == {1}
    for session in [first, *second]:
        await session.close()


GONE = "The replica of this session is gone; the session has ended"


@pytest.mark.parametrize("query", ["", f"?token={TOKEN}"])
async def test_a_session_is_told_in_its_protocol_that_its_replica_is_gone(
    gateway: Gateway, one: Replica, query: str
) -> None:
    address = await put_behind(gateway, one, token=TOKEN if query else None)
    for route in ("ws", "mcp", "own"):
        async with connect(f"{address.replace('http', 'ws', 1)}{query}/{route}") as session:
            assert await replica_of(session) == 0
            await session.send("die")
            if route != "own":
                told = json.loads(await session.recv())
                error = told["data"] if route == "ws" else told["error"]
                assert error["message"] == f"{GONE} (`openenv status sample` shows why)."
                assert error["code"] == ("SESSION_ERROR" if route == "ws" else -32000)
            with pytest.raises(ConnectionClosed) as closed:
                await session.recv()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1011, GONE)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (frame_head(300, TEXT) + b"x" * 280, ""),
        (frame_head(300, TEXT)[:3], ""),
        (frame_head(70_000, TEXT) + b"x" * 69_000, ""),
        (bytes([TEXT, 5]) + b"first", "close"),  # a message that goes on
        (frame_head(70_000, TEXT) + b"x" * 70_000, "error and close"),
        (frame_head(36, TEXT) + b'\xc3\x88"' + b"x" * 33, "error and close"),
        (frame_head(2, TEXT) + b"ab" + frame_head(3, TEXT) + b"abc", "error and close"),
    ],
)
async def test_what_its_replica_has_sent_in_part_is_made_whole_by_nothing(
    gateway: Gateway, one: Replica, sent: bytes, received: str
) -> None:
    address = await put_behind(gateway, one)
    reader, writer = await begin_raw(gateway, address, unmasked_client_frame(sent, BINARY))
    got = await reader.read()
    assert got.startswith(sent)
    rest = got[len(sent) :]
    close = close_payload(1011, GONE)
    assert (b"SESSION_ERROR" in rest) == (received == "error and close")
    assert rest.endswith(frame_head(len(close), CLOSE) + close) == bool(received)
    assert bool(rest) == bool(received)
    writer.close()


async def test_a_client_that_reads_late_gets_all_that_was_sent_before_the_close(
    gateway: Gateway, one: Replica
) -> None:
    address = await put_behind(gateway, one)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64_000)
        client.settimeout(WAIT_SECONDS)
        client.connect(("127.0.0.1", gateway.options.port))
        path = f"{address.removeprefix(gateway.options.address)}/ws"
        client.sendall(upgrade_request(f"127.0.0.1:{gateway.options.port}", path))
        client.sendall(unmasked_client_frame(b"long"))
        got = bytearray()
        while received := await asyncio.to_thread(client.recv, 500_000, socket.MSG_WAITALL):
            got += received
            await asyncio.sleep(0.15)  # as a slow reader
    left = close_payload(1001, "leaving")
    sent = frame_head(LONG_BYTES) + b"x" * LONG_BYTES + frame_head(len(left), CLOSE) + left
    assert bytes(got).endswith(sent)


async def test_a_token_is_compared_at_the_gateway(gateway: Gateway, one: Replica) -> None:
    address = await put_behind(gateway, one, token=TOKEN)
    check = one.health_checks[0]
    assert (check["authorization"], check[ENVIRONMENT_HEADER]) == (f"Bearer {TOKEN}", "sample")
    status, body = await ask(f"{address}/health")
    assert status == 401
    assert "wants its token" in json.loads(body)["detail"]
    assert (await ask(f"{address}/health", authorization=f"Bearer {TOKEN}x"))[0] == 401
    assert (await ask(f"{address}/health?token={TOKEN}x"))[0] == 401
    with pytest.raises(InvalidStatus, match="401"):
        await begin(address)
    assert (await ask(f"{address}/health", authorization=f"bearer {TOKEN}"))[0] == 200
    assert (await ask(f"{address}/health?token={TOKEN}"))[0] == 200
    assert (await ask(f"{address}?token={TOKEN}/health"))[1] == f"0 /?token={TOKEN}/health"
    # A page's browser asks before it sends the token.
    assert (await ask(f"{address}/health", "OPTIONS", access_control_request_method="GET"))[
        0
    ] == 200
    async with await begin(f"{address}?token={TOKEN}") as session:
        assert await replica_of(session) == 0


FEW_CONNECTIONS = 40


@pytest.fixture
def small(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """A gateway that has room for few connections, and short time limits."""
    monkeypatch.setattr(envoy, "_MAX_FDS", envoy._SPARE_FDS + 2 * FEW_CONNECTIONS)
    monkeypatch.setattr(configuration, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(configuration, "IDLE_SECONDS", 1.0)
    yield process.ensure_running(layout, ANY_PORT)
    process.stop(layout)


def connect_often(gateway: Gateway, sent: bytes) -> list[socket.socket]:
    """Open more connections than the gateway has room for, and send the same to each."""
    address = ("127.0.0.1", gateway.options.port)
    opened = [socket.create_connection(address) for _ in range(3 * FEW_CONNECTIONS)]
    for each in opened:
        with suppress(OSError):  # it was refused
            each.sendall(sent)
    return opened


@pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="only Linux has the option")
async def test_connections_that_are_silent_keep_no_session_out(
    small: Gateway, one: Replica
) -> None:
    address = await put_behind(small, one)
    silent = connect_often(small, b"")
    sessions = [await begin(address) for _ in range(FEW_CONNECTIONS // 2)]
    assert small.connections().problem is None
    await close(sessions)
    for each in silent:
        each.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"G",
        b"GET /envs/sample/health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"POST /envs/sample/mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n",
    ],
    ids=["a head without an end", "an answer, and then nothing", "a body that does not come"],
)
async def test_a_client_without_a_token_keeps_no_connection(
    small: Gateway, one: Replica, sent: bytes
) -> None:
    address = await put_behind(small, one, token=TOKEN)
    opened = connect_often(small, sent)
    await answers_again(small, f"{address}?token={TOKEN}")
    for each in opened:
        each.close()


async def answers_again(gateway: Gateway, address: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                async with await begin(address) as session:
                    await replica_of(session)
                return
            except (OSError, WebSocketException):
                await asyncio.sleep(0.1)


async def test_a_gateway_that_is_full_says_so(small: Gateway, one: Replica) -> None:
    address = await put_behind(small, one)
    assert small.connections() == Connections(0, FEW_CONNECTIONS, 0)
    opened = connect_often(small, b"G")
    async with asyncio.timeout(WAIT_SECONDS):
        while (found := small.connections()).refused < 2 * FEW_CONNECTIONS:
            await asyncio.sleep(0.01)
    assert found.problem is not None
    assert f"{FEW_CONNECTIONS} of {FEW_CONNECTIONS} connections are open" in found.problem
    for each in opened:
        each.close()
    await answers_again(small, address)
    assert small.connections().problem is None


async def test_the_gateway_speaks_tls_with_the_certificate_that_it_is_given(
    layout: Layout, one: Replica
) -> None:
    options = GatewayOptions("127.0.0.1", 0, str(TLS / "certificate.pem"), KEY)
    gateway = await asyncio.to_thread(process.ensure_running, layout, options)
    try:
        address = await put_behind(gateway, one)
        assert address.startswith("https://127.0.0.1:")
        trusts = ssl.create_default_context(cafile=TLS / "certificate.pem")
        async with await begin(address, ssl=trusts) as session:
            assert await replica_of(session) == 0
    finally:
        await asyncio.to_thread(process.stop, layout)


def test_a_home_has_one_gateway_and_two_homes_have_two(
    gateway: Gateway, layout: Layout, tmp_path: Path
) -> None:
    assert process.ensure_running(layout, ANY_PORT).options == gateway.options
    assert process.check_here(layout, gateway.options)  # it has its own port
    assert all_of(layout.runs) == []  # nobody takes it for a replica
    folder = layout.home / "other"
    folder.mkdir()
    other = Layout(folder)
    try:
        found = process.ensure_running(other, ANY_PORT)
        assert found.options.port != gateway.options.port
    finally:
        process.stop(other)


def test_its_files_and_its_admin_interface_are_its_owners_alone(gateway: Gateway) -> None:
    for path in (gateway.admin_socket, *gateway.config_folder.glob("*.json")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert gateway.config_folder.stat().st_mode & 0o077 == 0
    assert not list(gateway.config_folder.glob("tmp*"))  # files that were being written
    assert gateway.admin_socket.parent.stat().st_mode & 0o077 == 0


async def test_an_envoy_that_was_killed_comes_back_on_its_port_which_nobody_gets_meanwhile(
    gateway: Gateway, layout: Layout, one: Replica
) -> None:
    address = await put_behind(gateway, one)
    kill_envoy(gateway)
    assert gateway.admin_socket.exists()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", gateway.options.port))
    again = await asyncio.to_thread(process.ensure_running, layout, ANY_PORT)
    assert again.options == gateway.options
    async with asyncio.timeout(WAIT_SECONDS):
        while (await ask(f"{address}/health"))[0] != 200:
            await asyncio.sleep(0.01)
    kill_envoy(gateway)
    await asyncio.to_thread(process.stop, layout)
    assert not gateway.admin_socket.exists()


def kill_envoy(gateway: Gateway) -> None:
    with ShimClient.connect(gateway.run_file.socket_path) as link:
        psutil.Process(link.status["pid"]).kill()
        link.wait(lambda status: status["state"] == "exited", timeout=WAIT_SECONDS)


def kill_shim(gateway: Gateway) -> None:
    with ShimClient.connect(gateway.run_file.socket_path) as link:
        shim, envoy = link.status["shim"], psutil.Process(link.status["pid"])
    psutil.Process(shim["pid"]).kill()
    identity = ProcessIdentity(shim["pid"], shim["started_at"])
    assert wait_until_dead([identity], WAIT_SECONDS)
    envoy.wait(WAIT_SECONDS)  # the kernel ends it


BIND = """
import socket, sys
with socket.socket() as other:
    for option in sys.argv[2:]:
        other.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
    other.bind(("127.0.0.1", int(sys.argv[1])))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("options", [[], ["SO_REUSEADDR"], ["SO_REUSEADDR", "SO_REUSEPORT"]])
def test_another_user_cannot_have_the_port_of_a_gateway_that_was_killed(
    gateway: Gateway, layout: Layout, options: list[str]
) -> None:
    command = ["/usr/bin/env", "python3", "-c", BIND, str(gateway.options.port), *options]
    with process.hold_port(gateway):  # as the daemon does
        kill_shim(gateway)
        done = subprocess.run(command, user=NOBODY, stderr=subprocess.PIPE, text=True, check=False)
        assert "Address already in use" in done.stderr
        process.revive(layout)
        assert process.ensure_running(layout, ANY_PORT).options == gateway.options
        kill_shim(gateway)  # and a launch can start it, too
        assert process.ensure_running(layout, ANY_PORT).options == gateway.options


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (process.ensure_running, r"is in use by .*\(pid \d+\)"),
        (process.check_here, "the gateway is to have it"),
    ],
)
def test_a_port_that_is_taken_is_told_with_its_holder(
    layout: Layout, ask: Callable[..., object], told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*{told}"):
            ask(layout, GatewayOptions("127.0.0.1", port))
    assert process.read_gateway(layout) is None


@pytest.mark.parametrize("ask", [process.ensure_running, process.check_here])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GatewayOptions("localhost", 0), "not an IP address"),
        (GatewayOptions("192.0.2.77", 20999), "cannot listen on 192.0.2.77:20999"),
        (GatewayOptions("127.0.0.1", 0, "/no/such.pem", "/no/such.key"), "No such file"),
        (GatewayOptions("127.0.0.1", 0, str(TLS), str(TLS)), "cannot read .*: Is a directory"),
        (GatewayOptions("127.0.0.1", 0, KEY), "both files"),
        (GatewayOptions("127.0.0.1", 0, KEY, KEY), "are not a certificate and its key"),
    ],
)
def test_what_cannot_be_listened_with_is_told_before_anything_starts(
    layout: Layout, options: GatewayOptions, message: str, ask: Callable[..., object]
) -> None:
    with pytest.raises(GatewayFailed, match=message):
        ask(layout, options)
    assert process.read_gateway(layout) is None


@pytest.mark.parametrize(
    ("run_file", "problem"), [("{", "is damaged"), ('{"version": 99}', "by another version")]
)
def test_a_run_file_that_cannot_be_used_is_told_with_the_reason(
    layout: Layout, run_file: str, problem: str
) -> None:
    layout.run_dir(process.NAME).mkdir(parents=True)
    (layout.run_dir(process.NAME) / RUN_FILE_NAME).write_text(run_file)
    with pytest.raises(GatewayFailed, match=problem):
        process.ensure_running(layout, GatewayOptions("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("options", "address"),
    [
        (GatewayOptions("0.0.0.0", 1), "http://127.0.0.1:1"),
        (GatewayOptions("::", 1), "http://[::1]:1"),
        (GatewayOptions("::2", 1, "c", "k"), "https://[::2]:1"),
    ],
)
def test_its_address_is_one_that_can_be_connected_to(options: GatewayOptions, address: str) -> None:
    assert options.address == address


def test_whether_a_gateway_can_be_started_is_checked_and_its_package_told(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.check_here(layout, ANY_PORT).startswith("1.")
    assert process.read_gateway(layout) is None
    monkeypatch.setattr(process, "PACKAGE", "no-such-package")
    with pytest.raises(GatewayFailed) as caught:
        process.ensure_running(layout, ANY_PORT)
    assert caught.value.hint == install_command("gateway")


def test_an_envoy_that_does_not_run_on_this_machine_is_told(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "envoy"
    other.write_text("#!/bin/sh\necho 'version GLIBC_2.99 not found' >&2\nexit 1\n")
    other.chmod(0o700)
    monkeypatch.setattr(process, "find_envoy", lambda: other)
    with pytest.raises(GatewayFailed, match="does not run on this machine: version GLIBC"):
        process.check_here(layout, ANY_PORT)


async def test_requests_are_held_where_no_replica_is_healthy_and_never_where_all_are_full(
    gateway: Gateway, many: list[Replica], tmp_path: Path
) -> None:
    held = Replica(99)
    await held.start(path=tmp_path / "held.sock")
    full = [replace(each.endpoint, is_full=True) for each in many]
    address = await put_behind(gateway, *full, holding_socket=str(tmp_path / "held.sock"))
    sessions = await crowd(address, 16)
    assert 99 not in {await replica_of(session) for session in sessions}
    await close(sessions)
    for replica in many:
        replica.is_ill = True
    ill = Backend("ill", tuple(full), holding_socket=str(tmp_path / "held.sock"))
    await asyncio.to_thread(BackendFiles(gateway.config_folder).write, [ill])
    address = gateway.options.address_of("ill")
    async with asyncio.timeout(WAIT_SECONDS):
        while (await ask(f"{address}/x"))[0] != HTTPStatus.OK:  # Envoy has not read it yet
            await asyncio.sleep(0.01)
    async with await begin(address) as session:
        assert await replica_of(session) == 99
    await held.stop()


def backends_of(*names: str, port: int = 21000) -> list[Backend]:
    return [Backend(name, (Endpoint(0, "127.0.0.1", port),)) for name in names]


def files_of(folder: Path) -> dict[str, int]:
    """Which file is at each place: one that was replaced is another."""
    return {path.name: path.stat().st_ino for path in folder.rglob("*.json")}


def test_only_files_that_changed_or_are_absent_are_written(tmp_path: Path) -> None:
    backends = backends_of("one", "two")
    BackendFiles(tmp_path).write(backends)
    before = files_of(tmp_path)
    files = BackendFiles(tmp_path)
    files.write(backends)
    assert files_of(tmp_path) == before
    files.write(backends[:1])
    assert [path.name for path in (tmp_path / "endpoints").iterdir()] == ["one.json"]
    files, backends = BackendFiles(tmp_path), backends_of("one", "two")
    files.write(backends)
    shutil.rmtree(tmp_path / "endpoints")
    (tmp_path / "routes.json").unlink()
    files.write(backends)
    assert {"one.json", "two.json", "routes.json", "clusters.json"} == files_of(tmp_path).keys()


def test_no_route_leads_to_a_cluster_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, written, replace = BackendFiles(tmp_path), list[str](), envoy._replace

    def note(path: Path, content: Any) -> None:
        written.append(path.name)
        replace(path, content)

    monkeypatch.setattr(envoy, "_replace", note)
    files.write(backends_of("one"))
    assert written == ["one.json", "clusters.json", "routes.json"]
    written.clear()
    files.write(backends_of("two"))  # in place of the first
    assert written == ["two.json", "routes.json", "clusters.json", "routes.json"]


def test_a_change_of_one_environment_reads_and_makes_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BackendFiles(tmp_path)
    files.write(backends_of("one", "two", "three"))
    before, made = files_of(tmp_path), list[str]()
    of_backend = configuration.endpoints

    def note(backend: Backend) -> Any:
        made.append(backend.name)
        return of_backend(backend)

    monkeypatch.setattr(configuration, "endpoints", note)
    files.write([*backends_of("one", "two"), *backends_of("three", port=21001)])
    assert made == ["three"]
    replaced = {name for name, file in files_of(tmp_path).items() if before[name] != file}
    assert replaced == {"three.json", "routes.json"}
    told = (tmp_path / "routes.json").read_text()
    assert told.count("127.0.0.1:21000") == 2 * told.count("127.0.0.1:21001") > 0
