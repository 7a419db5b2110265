# SPDX-License-Identifier: Apache-2.0
"""Every WebSocket endpoint of an environment: sessions, JSON-RPC, attached, isolated, after HTTP.

All have one parser, whose frames are compared with those of `websockets` in `test_ws_frames.py` and
`test_fuzz.py`. The daemon has no endpoints, and a shared state's socket has frames of
its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest
from websockets.frames import Opcode

from openenvd.schema.protocol import HostConfig

from ..conftest import ECHO
from ..hosts import Host
from ..raw import HEAD, Raw, frame, opened, raw, upgraded
from .fuzzing import pieces_of

MB = 2**20
GOOD = frame(Opcode.TEXT, b"{}")  # JSON without a type, or a method: it is answered with an error
CLOSE = frame(Opcode.CLOSE, b"\x03\xe8")
Connect = Callable[[], AbstractContextManager[Raw]]


@pytest.fixture(
    scope="module", params=[{"shards": 1}, {"isolate": True}], ids=["shard", "isolated"]
)
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    config = HostConfig(
        "echo", env_class=ECHO, max_sessions=32, http_session_idle_seconds=0, **request.param
    )
    host = Host(config, tmp_path_factory.mktemp("host"))
    try:
        host.ready()
        yield host
        host.until(lambda capacity: capacity["sessions"] <= 1)  # the one that was begun over HTTP
        assert host.stop() == 0, host.log.read_text()
    finally:
        host.close()


@pytest.fixture(scope="module")
def session_id(host: Host) -> str:
    return host.create_session()


@pytest.fixture(params=["/ws", "/mcp", "after HTTP", "attached"])
def connect(request: pytest.FixtureRequest, host: Host, session_id: str) -> Connect:
    if request.param == "after HTTP":
        return partial(upgraded, host)
    path = f"/ws?session_id={session_id}" if request.param == "attached" else request.param
    return partial(opened, host, path)


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
        (frame(Opcode.TEXT, b"{}", mask=False), 1002),
        (frame(Opcode.TEXT, b"{}", reserved=4), 1002),
        (frame(Opcode.CONT, b"alone"), 1002),
        (frame(Opcode.TEXT, b"\xf4\x90\x80\x80", fin=False), 1007),  # the rest never comes
        (b"\x81\xff" + (100 * MB + 1).to_bytes(8, "big") + bytes(4), 1009),
        *(
            (frame(Opcode.CLOSE, code.to_bytes(2, "big")), code)
            for code in (1000, 1014, 3000, 4999)
        ),
        *((frame(Opcode.CLOSE, code.to_bytes(2, "big")), 1002) for code in (0, 999, 1005, 5000)),
        (frame(Opcode.CLOSE, b"\x03\xe8" + b"\xed\xa0\x80"), 1007),
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


def test_compression_is_not_agreed_on_and_refused(host: Host) -> None:
    offer = b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n"
    with raw(host) as client:
        client.send(HEAD.removesuffix(b"\r\n") + offer)
        head = client.head().lower()
        assert b"101" in head
        assert b"extensions" not in head
        client.send(frame(Opcode.TEXT, b"{}", reserved=4))
        assert list(answers(client)) == [1002]
