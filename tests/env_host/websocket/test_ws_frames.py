# SPDX-License-Identifier: Apache-2.0
"""What holds of any bytes that an environment gets: frames, handshakes, messages, connections.

OPENENVD_FUZZ_EXAMPLES=10000 pytest --timeout 0 tests/env_host/websocket/test_ws_frames.py
"""

import os
from collections.abc import Iterator
from functools import partial

import pytest
from websockets.utils import apply_mask

from openenvd.env_host.websocket import frames
from openenvd.env_host.websocket.frames import FrameParser
from openenvd.env_host.websocket.handshake import acceptance, parse_upgrade
from openenvd.schema.protocol import HostConfig
from openenvd.system.net.websocket import CLOSE, CONTINUATION, PING, TEXT

from ..hosts import Host, serving
from ..raw import FrameSpec
from . import fuzzing

BENCHMARK = "openenvd.env_host.bundled.benchmark.environment:BenchmarkEnvironment"
EXAMPLES = int(os.environ.get("OPENENVD_FUZZ_EXAMPLES", "12"))
HEAD = (
    b"GET /ws?session_id=a%20b HTTP/1.1\r\nHost: localhost\r\nUpgrade: WebSocket\r\n"
    b"Connection: keep-alive, Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture(scope="module", params=[False, True], ids=["shards", "isolated"])
def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    config = HostConfig("benchmark", env_class=BENCHMARK, isolate=request.param)
    with serving(config, tmp_path_factory.mktemp("fuzz")) as host:
        yield host
    log = host.log.read_text()
    assert "unexpected" not in log, log


@pytest.mark.parametrize("unmasked_by", ["C", "Python"])
def test_frames_are_understood_as_websockets_understands_them(
    unmasked_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unmasked_by == "Python":
        monkeypatch.setattr(frames, "apply_mask", apply_mask)
    fuzzing.try_examples(fuzzing.check_frames, 8 * EXAMPLES, fuzzing.frame_lists, fuzzing.cuts)


FIRST, LAST = FrameSpec(TEXT, b"{", fin=False), FrameSpec(CONTINUATION, b"}")


@pytest.mark.parametrize(
    "specs",
    [
        *([FrameSpec(TEXT, bytes(size))] for size in (1, 125, 126, 65535)),
        [FrameSpec(TEXT, bytes(125), length_bytes=2)],
        [FrameSpec(TEXT, bytes(65535), length_bytes=8)],
        [FrameSpec(TEXT, b"", announced=1 << 63)],
        [FrameSpec(TEXT, bytes(fuzzing.MAX_BYTES), fin=False), LAST],
        [FrameSpec(TEXT, bytes(fuzzing.MAX_BYTES - 1), fin=False), LAST],
        [FrameSpec(PING, b"x", fin=False)],
        [FrameSpec(PING, bytes(126))],
        [FIRST, FrameSpec(PING, b"between"), LAST, LAST],
        [FIRST, FrameSpec(TEXT, b"}")],
        [FrameSpec(TEXT, b"\xc3", fin=False), FrameSpec(CONTINUATION, b"")],
        [FrameSpec(TEXT, b"{}", masked=False)],
        [FrameSpec(CLOSE, b"\x03\xe8\xed\xa0\x80")],
        *([FrameSpec(TEXT, b"{}", reserved=bits)] for bits in (1, 2, 4)),
        *([FrameSpec(opcode, b"")] for opcode in (3, 7, 11, 15)),
    ],
)
def test_frames_at_the_borders_of_the_rules_are_understood_likewise(specs: list[FrameSpec]) -> None:
    fuzzing.check_frames(specs, [1] * 200)
    fuzzing.check_frames(specs, [])


@pytest.mark.parametrize("code", [0, *range(999, 1017), 2999, 3000, 4999, 5000, 65535])
def test_a_close_code_is_taken_or_refused_as_by_websockets(code: int) -> None:
    fuzzing.check_frames([FrameSpec(CLOSE, code.to_bytes(2, "big"))], [])


def test_many_empty_fragments_take_neither_time_nor_memory() -> None:
    """Adding all of them up again with each would take minutes."""
    parser = FrameParser(1 << 20)
    parser.feed(FrameSpec(TEXT, b"", fin=False).encode())
    empty = FrameSpec(CONTINUATION, b"", fin=False).encode() * 1000
    for _ in range(300):
        assert parser.feed(empty) == []
    assert parser._fragments is not None
    assert not parser._fragments.data
    assert parser.feed(FrameSpec(CONTINUATION, b"x").encode()) == [(TEXT, b"x")]


def test_a_handshake_is_read_and_answered_as_websockets_and_the_rfc_have_it() -> None:
    fuzzing.try_examples(fuzzing.check_head, 5 * EXAMPLES, fuzzing.heads())
    upgrade = parse_upgrade(HEAD)
    assert upgrade is not None
    assert (upgrade.path, upgrade.parameter("session_id")) == ("/ws", "a b")
    assert upgrade.parameter("nothing") is None
    assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in acceptance(upgrade)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET ", b"POST "),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"Host: localhost\r\n", b""),
        (b"WebSocket\r\n", b"h2c\r\n"),
        (b"keep-alive, Upgrade", b"keep-alive"),
        (b"Version: 13", b"Version: 8"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"short"),
        (b"dGhlIHNhbXBsZSBub25jZQ==", b"dGhlIHNhbXBsZSBub25jZQ"),
        (b"Host:", b"Host :"),
        (b"/ws", b"/ws\xc3\xa9"),
        (b"Host: l", b"H\xc3\xb6st: a\r\nHost: l"),
        (b"Host: l", b" folded: a\r\nHost: l"),
        (b"Host: l", b"Other: \x00\r\nHost: l"),
        (b"Upgrade: W", b"no colon\r\nUpgrade: W"),
        (b"Connection", b"Content-Length: 3\r\nConnection"),
    ],
)
def test_a_request_that_is_not_plainly_a_handshake_is_not_parsed(old: bytes, new: bytes) -> None:
    assert old in HEAD
    assert parse_upgrade(HEAD.replace(old, new)) is None


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_every_message_is_answered_or_its_connection_closed(host: Host, path: str) -> None:
    check = partial(fuzzing.check_conversation, host, path)
    fuzzing.try_examples(check, EXAMPLES, fuzzing.conversations, fuzzing.cuts)


def test_whatever_is_sent_the_connection_ends_and_others_are_served(host: Host) -> None:
    fuzzing.try_examples(partial(fuzzing.check_stream, host), EXAMPLES, fuzzing.streams)
