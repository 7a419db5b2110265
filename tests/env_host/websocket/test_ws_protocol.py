# SPDX-License-Identifier: Apache-2.0
"""The WebSocket under a session, over real sockets: what peers do that clients should not."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
from websockets.frames import Opcode

from openenvd.env_host.environment.definition import definition_of_class
from openenvd.env_host.serving.mcp import Mcp
from openenvd.env_host.serving.ws_session import SessionService, SessionSocket
from openenvd.env_host.sessions.session import Attached, Session, SessionWatch
from openenvd.env_host.sessions.table import SessionTable
from openenvd.env_host.websocket.protocol import WebSocketProtocol
from openenvd.schema.protocol import HostConfig
from openenvd.system.net.websocket import PING, PONG, frame_head

from ..conftest import ECHO, StartHost
from ..hosts import WAIT_SECONDS, Host, serving
from ..raw import HEAD, HEALTH, Raw, frame, opened, raw, upgraded
from .fuzzing import pieces_of

HEALTHY = b'{"status":"healthy"}'


@pytest.fixture
def host(serve: StartHost) -> Host:
    return serve(ECHO, reset_first=False)


def test_a_handshake_may_arrive_byte_by_byte_and_with_frames_behind_it(host: Host) -> None:
    data = HEAD + frame(Opcode.TEXT, b'{"type":"reset"}') + frame(Opcode.TEXT, b'{"type":"state"}')
    with raw(host) as client:
        client.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(len(HEAD) - 1):
            client.send(data[start : start + 1])
        client.send(data[len(HEAD) - 1 :])
        assert b"101" in client.head()
        assert client.answer()["type"] == "observation"
        assert client.answer()["type"] == "state"


@pytest.mark.parametrize("pieces", [(HEALTH + HEAD,), (HEALTH, HEAD), (HEALTH * 3, HEAD)])
def test_a_handshake_behind_requests_begins_a_session_after_their_answers(
    host: Host, pieces: tuple[bytes, ...]
) -> None:
    with raw(host) as client:
        for piece in pieces:
            client.send(piece)
        for _ in range(b"".join(pieces).count(HEALTH)):
            assert b" 200 " in client.head()
            assert client.read(len(HEALTHY)) == HEALTHY
        assert b" 101 " in client.head()
        client.text('{"type":"reset"}')
        assert client.answer()["type"] == "observation"


def test_a_ping_is_answered_while_a_call_is_under_way(serve: StartHost) -> None:
    with serve("Async").open() as client:
        client.ask("reset")
        client.send("step", {"what": "forever", "gate": "/dev/null"})
        assert client.connection.ping().wait(WAIT_SECONDS)


def test_the_server_waits_for_the_clients_close_frame(host: Host) -> None:
    with opened(host) as client:
        client.text('{"type":"close"}')
        assert client.receive() == (Opcode.CLOSE, b"\x03\xe8")
        host.emptied()
        client.text('{"type":"state"}')  # is not answered any more
        client.send(frame(Opcode.CLOSE, b"\x03\xe8"))
        assert client.is_over()


@pytest.mark.parametrize("how", ["sending side", "reset"])
def test_a_client_that_closes_without_a_close_frame_has_left(host: Host, how: str) -> None:
    with opened(host) as client:
        client.text('{"type":"reset"}')
        client.answer()
        host.note_that(sessions=1)
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            client.connection.shutdown(socket.SHUT_WR)
            assert client.is_over()
    host.emptied()


def test_a_client_that_does_not_read_is_answered_once_it_does(host: Host) -> None:
    """More than fits into all buffers in between, both ways."""
    message = json.dumps({"type": "step", "data": {"message": "x" * 100_000}})
    steps = 400
    with opened(host) as client:
        client.connection.settimeout(1.0)
        data = frame(Opcode.TEXT, message.encode()) * steps
        sent = 0
        try:
            while sent < len(data):
                sent += client.connection.send(data[sent : sent + 65536])
        except TimeoutError:  # it does not take more either
            pass
        assert sent < len(data)
        client.connection.settimeout(WAIT_SECONDS)
        client.connection.setblocking(True)
        whole = sent // (len(data) // steps)
        for _ in range(whole):
            assert client.answer()["data"]["observation"]["message_length"] == 100_000


class Listening(WebSocketProtocol):
    """Notes what it hears."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.left = self._loop.create_future()

    def client_left(self) -> None:
        self.left.set_result(None)


async def connected(protocol: asyncio.Protocol) -> tuple[socket.socket, socket.socket]:
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, ours)
    return ours, peer


async def test_a_peer_that_does_not_read_gets_one_pong_for_its_last_ping() -> None:
    protocol = Listening()
    _, peer = await connected(protocol)
    protocol.pause_writing()
    for number in range(1000):
        protocol.data_received(frame(Opcode.PING, b"%d" % number))
    assert protocol.transport.get_write_buffer_size() == 0
    protocol.resume_writing()
    assert peer.recv(65536) == frame_head(3, PONG) + b"999"
    protocol.transport.abort()
    await protocol.left
    peer.close()


@pytest.mark.parametrize(
    "goodbye",
    [b"", frame(Opcode.CLOSE, b""), b"\xff\xff"],
    ids=["silence", "close frame", "no frame"],
)
async def test_a_connection_ends_although_its_peer_does_not_read(goodbye: bytes) -> None:
    """Whether the peer sends a close frame, closes its side without one, or a broken frame."""
    protocol = Listening()
    protocol.close_seconds = 0.05
    ours, peer = await connected(protocol)
    protocol.send_text(b"x" * 10_000_000)
    if goodbye:
        peer.send(goodbye)
    else:
        peer.shutdown(socket.SHUT_WR)
    await protocol.left
    assert protocol.transport.get_write_buffer_size()
    while ours.fileno() >= 0:
        await asyncio.sleep(0.01)
    peer.close()


async def test_a_silent_client_is_pinged_and_then_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    protocol = Listening()
    ours, peer = await connected(protocol)
    protocol.check_liveness()  # the connection is news enough
    protocol.check_liveness()
    assert peer.recv(100) == frame_head(0, PING)
    peer.send(frame(Opcode.PONG, b""))
    while not protocol._is_heard:
        await asyncio.sleep(0)
    protocol.check_liveness()
    protocol.check_liveness()
    assert peer.recv(100) == frame_head(0, PING)
    protocol.check_liveness()
    await protocol.left
    assert b"keepalive" in peer.recv(100)
    assert "is closed: no answer to a ping (client local)" in caplog.text
    peer.close()
    ours.close()


class Registry:
    """Session ids, and no notifications."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None

    def new_id(self) -> str:
        return "session"

    def on_begin(self, session: Session, socket: Attached) -> None:
        pass

    def on_end(self, session: Session) -> None:
        pass


class AdmissionOnDemand:
    """Admits nobody before `opened` is set."""

    totals, room = (0, 1), 1

    def __init__(self, *, is_open: bool = False) -> None:
        self.opened = asyncio.Event()
        if is_open:
            self.opened.set()

    def take_promise(self) -> bool:
        return False

    async def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        await self.opened.wait()
        return has_room()


def table_of(admission: AdmissionOnDemand) -> SessionTable:
    definition = definition_of_class(ECHO, "echo")
    return SessionTable(definition, 1, exclusive=False, registry=Registry(), admission=admission)


def session_socket_of(table: SessionTable) -> SessionSocket:
    loop = asyncio.get_running_loop()
    service = SessionService(frozenset({"/ws"}), table, Mcp(table).answer, loop)
    return SessionSocket(service, set())


@pytest.mark.parametrize("turns", range(4))
async def test_a_client_that_leaves_as_its_slot_becomes_free_does_not_keep_it(turns: int) -> None:
    admission = AdmissionOnDemand()
    table = table_of(admission)
    session_socket = session_socket_of(table)
    _, peer = await connected(session_socket)
    session_socket.begin(None)
    await asyncio.sleep(0)
    admission.opened.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    session_socket._leave()
    waited = 0
    while table.taken or waited < 5:
        await asyncio.sleep(0.001)
        waited += 1
    assert len(table) == 0
    session_socket.transport.abort()
    await asyncio.sleep(0.01)
    peer.close()


async def test_of_hung_creations_the_longest_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table, noted = table_of(AdmissionOnDemand(is_open=True)), list[Session]()
    table.max_sessions = 3
    monkeypatch.setattr(Session, "note_slow_creation", lambda each: noted.append(each))
    sessions = [await table.reserve() for _ in range(3)]
    table._sessions = {str(number): each for number, each in enumerate(sessions)}
    for session, seconds in zip(sessions, (61.0, 99.0, 1.0), strict=True):
        session.running, session.call_began = 1, asyncio.get_running_loop().time() - seconds
    await SessionWatch(table)._look(is_round=False)
    assert noted == [sessions[1]]


async def test_hung_calls_are_logged_and_idle_ones_expire(caplog: pytest.LogCaptureFixture) -> None:
    table = table_of(AdmissionOnDemand(is_open=True))
    watch = SessionWatch(table)
    session = await table.reserve()
    session.busy, session.call_name, session.call_began = 1, "step", 0.0
    watch._next_log[session.id] = 0.0
    for now in (59.0, 61.0, 100.0, 123.0):
        watch._log_hung(session, now)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"session {session.id}: step has not returned for {n} s" for n in (61, 123)]
    await table.close(session)
    table.unattached_seconds = 10.0
    session = await table.open()
    session.busy = 1
    assert not watch._end_idle(session, session.last_used + 11.0)
    session.busy = 0
    assert not watch._end_idle(session, session.last_used + 9.0)
    assert watch._end_idle(session, session.last_used + 11.0)
    assert len(table) == 0


# Every endpoint: sessions, JSON-RPC, attached, isolated, after HTTP. All have one parser, whose
# frames are compared with those of `websockets` in `test_ws_frames.py`.


MB = 2**20
GOOD = frame(Opcode.TEXT, b"{}")  # JSON without a type, or a method: it is answered with an error
CLOSE = frame(Opcode.CLOSE, b"\x03\xe8")
Connect = Callable[[], AbstractContextManager[Raw]]


@pytest.fixture(
    scope="module", params=[{"shards": 1}, {"isolate": True}], ids=["shard", "isolated"]
)
def endpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    config = HostConfig(
        "echo", env_class=ECHO, max_sessions=32, http_session_idle_seconds=0, **request.param
    )
    with serving(config, tmp_path_factory.mktemp("host")) as host:
        yield host
        host.until(lambda capacity: capacity["sessions"] <= 1)  # the one that was begun over HTTP


@pytest.fixture(scope="module")
def session_id(endpoints: Host) -> str:
    return endpoints.create_session()


@pytest.fixture(params=["/ws", "/mcp", "after HTTP", "attached"])
def connect(request: pytest.FixtureRequest, endpoints: Host, session_id: str) -> Connect:
    if request.param == "after HTTP":
        return partial(upgraded, endpoints)
    path = f"/ws?session_id={session_id}" if request.param == "attached" else request.param
    return partial(opened, endpoints, path)


def in_fragments(payload: bytes, size: int) -> bytes:
    cuts = range(0, len(payload), size)
    return b"".join(
        frame(
            Opcode.CONT if at else Opcode.TEXT,
            payload[at : at + size],
            fin=at + size >= len(payload),
        )
        for at in cuts
    )


def answers(client: Raw) -> Iterator[int]:
    """The opcodes that come back, and in the end the code of the close frame."""
    while True:
        opcode, payload = client.receive()
        if opcode == Opcode.CLOSE:
            yield int.from_bytes(payload[:2], "big")
            return
        yield opcode


@pytest.mark.parametrize("chop", [1, 100])
def test_messages_in_fragments_and_pings_between_them_are_answered(
    connect: Connect, chop: int
) -> None:
    first, last = frame(Opcode.TEXT, b"{", fin=False), frame(Opcode.CONT, b"}")
    with connect() as client:
        sent = first + frame(Opcode.PING, b"between") + last
        client.send_what_is_taken(pieces_of(sent, [chop] * len(sent)))
        assert {client.receive()[0] for _ in range(2)} == {Opcode.PONG, Opcode.TEXT}
        client.send(frame(Opcode.PONG, b"unasked") + CLOSE)
        assert list(answers(client)) == [1000]
        assert client.is_over()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(Opcode.TEXT, b"{}", masked=False), 1002),
        (frame(Opcode.TEXT, b"\xf4\x90\x80\x80", fin=False), 1007),  # the rest never comes
        (b"\x81\xff" + (100 * MB + 1).to_bytes(8, "big") + bytes(4), 1009),
        (frame(Opcode.CLOSE, b"\x0f\xa0"), 4000),
    ],
)
def test_what_ends_a_connection_is_answered_with_its_code(
    connect: Connect, sent: bytes, code: int
) -> None:
    with connect() as client:
        client.send(GOOD)
        assert client.receive()[0] == Opcode.TEXT  # now the session has begun
        client.send(sent + GOOD)
        assert list(answers(client)) == [code]
        assert client.is_over()


def test_a_binary_message_is_an_error_that_ends_the_session(connect: Connect) -> None:
    with connect() as client:
        client.send(frame(Opcode.BINARY, bytes(MB)))
        assert list(answers(client)) == [Opcode.TEXT, 1000]
        client.send(CLOSE)
        assert client.is_over()


@pytest.mark.parametrize(
    ("sent", "count"),
    [
        (frame(Opcode.TEXT, b"{}".ljust(16 * MB)), 1),
        (in_fragments(b"{}".ljust(4 * MB), 64), 1),
        (frame(Opcode.TEXT, b"{}".ljust(4096)) * 1000, 1000),
    ],
    ids=["16 MB", "64,000 fragments", "1,000 at once"],
)
def test_large_and_many_messages_are_answered(connect: Connect, sent: bytes, count: int) -> None:
    with connect() as client:
        client.send_what_is_taken([sent])
        assert [client.receive()[0] for _ in range(count)] == [Opcode.TEXT] * count


def test_compression_is_not_agreed_on_and_refused(endpoints: Host) -> None:
    offer = b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    with raw(endpoints) as client:
        client.send(HEAD.removesuffix(b"\r\n") + offer)
        head = client.head().lower()
        assert b"101" in head
        assert b"extensions" not in head
        client.send(frame(Opcode.TEXT, b"{}", reserved=4))
        assert list(answers(client)) == [1002]
