# SPDX-License-Identifier: Apache-2.0
"""What one HTTP connection may send, and how long it may take: both of uvicorn's parsers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server
from websockets.asyncio.client import connect

from openenvd.system.net.connection_limit import Listener
from openenvd.system.net.http_limits import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    SHORT_BODY_BYTES,
    BodyLimit,
    HttpTiming,
    limited,
)

WAIT_SECONDS = 30.0
SOON = HttpTiming(
    head_seconds=0.2, body_seconds=0.2, body_bytes=10_000, response_seconds=0.2, unread_seconds=0.2
)
# Where all must be waited for: a busy machine may stop this process for some tenths of a second.
PATIENT = HttpTiming(head_seconds=1.0, body_seconds=1.0, body_bytes=10_000, response_seconds=1.0)
LARGE_BYTES = 40_000_000  # more than sockets and readers take
LATER = HttpTiming()
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Application:
    """Answers with the size of the body, as soon as it may."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.received = 0
        self.may_read = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_read.set()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                await send({"type": "websocket.send", "text": "here"})
            return
        self.seen.append(scope["path"])
        if scope["path"] in ("/large", "/stream"):
            await self._send_large(send, parts=1 if scope["path"] == "/large" else 400)
            return
        await self.may_read.wait()
        size, more = 0, scope["path"] != "/unread"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.seen.append("disconnect")
                return
            size, more = size + len(message["body"]), message["more_body"]
            self.received += len(message["body"])
        await self.may_answer.wait()
        body = b"%d" % size
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_large(self, send: Any, parts: int) -> None:
        headers = [(b"content-length", b"%d" % LARGE_BYTES)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(parts):
            part = b"x" * (LARGE_BYTES // parts)
            more = number < parts - 1
            await send({"type": "http.response.body", "body": part, "more_body": more})
        self.seen.append("sent")


class Served:
    """A server with an application, and its port."""

    def __init__(self, app: Application, port: int) -> None:
        self.app = app
        self.port = port
        self._peers: list[Peer] = []

    async def connect(self) -> Peer:
        self._peers.append(await asyncio.open_connection("127.0.0.1", self.port))
        return self._peers[-1]

    def disconnect(self) -> None:
        for _, writer in self._peers:
            writer.transport.abort()


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol], ids=["httptools", "h11"])
def serve(request: pytest.FixtureRequest) -> Serve:
    @asynccontextmanager
    async def serving(
        timing: HttpTiming = LATER,
        *,
        most: int = 100,
        most_body: int = 1_000_000,
        wait_seconds: float = WAIT_SECONDS,
    ) -> AsyncIterator[Served]:
        app = Application()
        config = Config(
            BodyLimit(app, most_body, wait_seconds=wait_seconds),
            http=limited(request.param, timing),
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        server = Server(config)
        server.lifespan = config.lifespan_class(config)

        def make_protocol(limit: Any) -> asyncio.BaseProtocol:
            protocol: Any = limited(request.param, timing)(config, server.server_state, {})
            protocol.limit = limit
            made: asyncio.BaseProtocol = protocol
            return made

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(listening, most, make_protocol)
            listener.start()
            served = Served(app, listening.getsockname()[1])
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    yield served
            finally:
                served.disconnect()
                listener.close()
                app.may_read.set()
                app.may_answer.set()
                async with asyncio.timeout(WAIT_SECONDS):
                    await until(lambda: not server.server_state.tasks)
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
                await asyncio.sleep(0)

    return serving


@asynccontextmanager
async def connected(
    serving: AbstractAsyncContextManager[Served],
) -> AsyncIterator[tuple[Application, Peer]]:
    """An application that is served, and a connection to it."""
    async with serving as served:
        yield served.app, await served.connect()


async def answer(peer: Peer) -> tuple[int, bytes]:
    """Read one answer: its status and its body."""
    head = await peer[0].readuntil(b"\r\n\r\n")
    length = next(
        int(line[15:])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    return int(head.split()[1]), await peer[0].readexactly(length)


async def ask(peer: Peer, request: bytes) -> tuple[int, bytes]:
    peer[1].write(request)
    return await answer(peer)


async def is_closed(peer: Peer) -> bool:
    """Wait until the server has closed; return whether nothing came before that."""
    try:
        return await peer[0].read() == b""
    except ConnectionError:
        return True


async def until(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.01)


def get(size: int, path: str = "/") -> bytes:
    head = f"GET {path} HTTP/1.1\r\nHost: a\r\nX: ".encode()
    return head + b"x" * (size - len(head) - 4) + b"\r\n\r\n"


def post(body: bytes, path: str = "/") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("piece", [1000, 10**6])
async def test_a_head_of_the_limit_passes_and_one_byte_more_does_not(
    serve: Serve, piece: int
) -> None:
    async def ask_in_pieces(request: bytes) -> tuple[int, bytes]:
        peer = await served.connect()
        for at in range(0, len(request), piece):
            peer[1].write(request[at : at + piece])
            await peer[1].drain()
            await asyncio.sleep(0)
        return await answer(peer)

    async with serve() as served:
        assert await ask_in_pieces(get(MAX_HEAD_BYTES)) == (200, b"0")
        status, _ = await ask_in_pieces(get(MAX_HEAD_BYTES + 1))
        assert status == 431
        assert served.app.seen == ["/"]


async def test_a_long_head_in_one_piece_with_its_body_passes(serve: Serve) -> None:
    body = b"b" * 100_000
    request = (
        get(MAX_HEAD_BYTES - 100)
        .replace(b"GET", b"POST")
        .replace(b"Host: a", b"Host: a\r\nContent-Length: %d" % len(body))
    )
    async with connected(serve()) as (_, peer):
        assert await ask(peer, request + body) == (200, b"100000")
        assert await ask(peer, get(100)) == (200, b"0")


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\nX: ", CHUNKED + b"1\r\nb\r\n0\r\nX: "])
async def test_an_endless_head_or_trailer_is_answered_and_no_longer_taken(
    serve: Serve, begun: bytes
) -> None:
    async with connected(serve()) as (app, peer):
        peer[1].write(begun)
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                peer[1].write(b"x" * 1_000_000)
                await peer[1].drain()
        if begun.startswith(CHUNKED):
            with contextlib.suppress(ConnectionError):  # h11 answers 400, and does not read on
                assert (await answer(peer))[0] in (400, 431)
            return
        assert (await answer(peer))[0] == 431
        assert not app.seen


async def test_pipelined_and_unread_bodies_keep_the_connection(serve: Serve) -> None:
    async with connected(serve()) as (_, peer):
        for _ in range(20):
            peer[1].write(post(b"a") + get(1000) + post(b"bb") + get(1000)[:500])
            peer[1].write(get(1000)[500:])
            assert [await answer(peer) for _ in range(4)] == [
                (200, b"1"), (200, b"0"), (200, b"2"), (200, b"0"),
            ]  # fmt: skip
    async with connected(serve()) as (_, peer):
        request = post(b"b" * 100, "/unread")
        assert await ask(peer, request[:-50]) == (200, b"0")
        assert await ask(peer, request[-50:] + get(100)) == (200, b"0")
    async with connected(serve()) as (_, peer):
        peer[1].write(b"\r\n" * MAX_HEAD_BYTES)
        said = await peer[0].read()  # until it is closed
        assert said.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))  # h11 takes no empty line at all


async def test_a_flood_of_pipelined_requests_is_not_kept(serve: Serve) -> None:
    """httptools parses all that has come; h11 stops at the second, and the socket is not read."""
    async with connected(serve()) as (app, peer):
        app.may_answer.clear()
        peer[1].write(get(100) * (MAX_PIPELINED + 2))
        await until(lambda: bool(app.seen))
        await asyncio.sleep(0)
        app.may_answer.set()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(MAX_PIPELINED + 2):
                assert await answer(peer) == (200, b"0")
            return
        assert len(app.seen) <= MAX_PIPELINED


async def test_a_silent_connection_is_closed_also_before_the_rest_of_its_body(serve: Serve) -> None:
    async with serve(SOON) as served:
        assert await is_closed(await served.connect())
    async with connected(serve(SOON)) as (_, peer):
        assert await ask(peer, post(b"b" * 100, "/unread")[:-50]) == (200, b"0")
        assert await is_closed(peer)


async def test_half_a_head_or_body_is_refused_however_it_trickles(serve: Serve) -> None:
    async with connected(serve(SOON)) as (app, peer):
        assert await ask(peer, get(100)) == (200, b"0")
        trickle = asyncio.create_task(_trickle(peer, get(10_000)))
        assert (await answer(peer))[0] == 408
        trickle.cancel()
        assert app.seen == ["/"]
    async with connected(serve(SOON)) as (app, peer):
        trickle = asyncio.create_task(_trickle(peer, post(b"b" * 10_000)[:-5000]))
        peer[1].write(post(b"b" * 100_000)[:5000])
        assert (await answer(peer))[0] == 408
        trickle.cancel()
        await until(lambda: app.seen == ["/", "disconnect"])


async def _trickle(peer: Peer, data: bytes) -> None:
    for at in range(len(data)):
        peer[1].write(data[at : at + 1])
        await asyncio.sleep(0.02)


async def test_a_body_that_grows_or_is_not_read_and_an_answer_are_waited_for(serve: Serve) -> None:
    async with connected(serve(PATIENT)) as (_, peer):
        request = post(b"b" * 600_000)
        for at in range(0, len(request), 30_000):
            peer[1].write(request[at : at + 30_000])
            await asyncio.sleep(PATIENT.body_seconds / 10)
        assert await answer(peer) == (200, b"600000")
    async with connected(serve(PATIENT)) as (app, peer):
        app.may_read.clear()
        peer[1].write(post(b"b" * 900_000))
        await until(lambda: app.seen == ["/"])
        await asyncio.sleep(2 * PATIENT.body_seconds)
        app.may_read.set()
        assert await answer(peer) == (200, b"900000")
    async with connected(serve(PATIENT)) as (app, peer):
        app.may_answer.clear()
        peer[1].write(post(b"b"))
        await asyncio.sleep(2 * PATIENT.head_seconds)
        app.may_answer.set()
        assert await answer(peer) == (200, b"1")


@pytest.mark.parametrize("path", ["/large", "/stream"])
async def test_a_response_that_is_not_read_is_cut_and_a_slow_reader_gets_it_whole(
    serve: Serve, path: str
) -> None:
    async with connected(serve(SOON)) as (app, peer):
        peer[1].write(get(100, path))
        await until(lambda: app.seen == [path, "sent"])
        await asyncio.sleep(6 * SOON.response_seconds)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer(peer)
    async with connected(serve(PATIENT)) as (_, peer):
        peer[1].write(get(100, path))
        await peer[0].readuntil(b"\r\n\r\n")
        size = 0
        while size < LARGE_BYTES:
            size += len(await peer[0].readexactly(2_000_000))
            await asyncio.sleep(PATIENT.response_seconds / 10)
        assert await ask(peer, get(100)) == (200, b"0")


async def test_a_body_is_refused_by_its_announced_length(serve: Serve) -> None:
    async with connected(serve(most_body=1000)) as (app, peer):
        status, text = await ask(peer, post(b"b" * 1001)[:-1001])
        assert (status, b"at most 1000 bytes" in text) == (413, True)
        assert not app.seen


async def test_a_chunked_body_is_refused_when_it_has_become_too_long(serve: Serve) -> None:
    async with serve(most_body=1000) as served:
        peer = await served.connect()
        chunk = b"3e8\r\n" + b"b" * 1000 + b"\r\n"
        assert await ask(peer, CHUNKED + chunk + b"0\r\n\r\n") == (200, b"1000")
        peer[1].write(CHUNKED)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                peer[1].write(chunk)
                await peer[1].drain()
        assert (await answer(peer))[0] == 413
        await until(lambda: served.app.seen[-1] == "disconnect")


MOST = 1_000_000
ROOM = 4 * MOST + 8 * SHORT_BODY_BYTES + 300_000  # the bound, and a last receive of each


async def halves(served: Served) -> list[Peer]:
    """Clients that have sent most of a long body, until no more of it is read."""
    peers = []
    for count in range(1, 9):
        peers.append(await served.connect())
        peers[-1][1].write(post(b"b" * MOST)[:-100_000])
        enough = min(count * 850_000, 4 * MOST)
        while served.app.received <= enough:
            await asyncio.sleep(0.01)
    return peers


async def test_bodies_that_have_arrived_in_part_are_bounded_together(serve: Serve) -> None:
    async with serve(most_body=MOST) as served:
        peers = await halves(served)
        await asyncio.sleep(0.1)  # in which the others would be read
        assert served.app.received <= ROOM
        assert await ask(await served.connect(), post(b"short")) == (200, b"5")
        for peer in peers:
            peer[1].write(b"b" * 100_000)
        for peer in peers:
            assert await answer(peer) == (200, b"%d" % MOST)


async def test_a_body_that_others_leave_no_room_for_is_refused(serve: Serve) -> None:
    async with serve(most_body=MOST, wait_seconds=0.1) as served:
        peers = await halves(served)
        status, text = await answer(peers[-1])
        assert (status, b"try again later" in text) == (503, True)
        peers[0][1].write(b"b" * 100_000)  # the oldest is read
        assert await answer(peers[0]) == (200, b"%d" % MOST)


async def test_the_oldest_connection_without_a_request_makes_room(serve: Serve) -> None:
    async with serve(most=4) as served:
        served.app.may_answer.clear()
        busy = await served.connect()
        busy[1].write(get(100))
        await until(lambda: bool(served.app.seen))
        silent = [await served.connect() for _ in range(20)]
        for peer in silent[:-3]:
            assert await is_closed(peer)
        served.app.may_answer.set()
        assert await answer(busy) == (200, b"0")
        for peer in silent[-2:]:
            assert await ask(peer, get(100)) == (200, b"0")
    async with serve(most=4) as served:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", served.port)
            for _ in range(50):  # the loop, which accepts, does not run meanwhile
                stack.enter_context(socket.create_connection(address))
            assert await ask(await served.connect(), get(100)) == (200, b"0")


async def test_a_newcomer_is_turned_away_where_each_has_a_request(serve: Serve) -> None:
    async with serve(most=2) as served:
        served.app.may_answer.clear()
        busy = [await served.connect() for _ in range(2)]
        for peer in busy:
            peer[1].write(get(100))
        await until(lambda: len(served.app.seen) == 2)
        assert (await answer(await served.connect()))[0] == 503
        served.app.may_answer.set()
        assert [await answer(peer) for peer in busy] == [(200, b"0")] * 2
        assert await ask(await served.connect(), get(100)) == (200, b"0")


async def test_a_websocket_stays_open(serve: Serve) -> None:
    async with serve(SOON) as served, connect(f"ws://127.0.0.1:{served.port}/ws") as websocket:
        assert await websocket.recv() == "here"
        await asyncio.sleep(3 * SOON.head_seconds)
        await websocket.send("still?")
        assert await websocket.recv() == "here"
