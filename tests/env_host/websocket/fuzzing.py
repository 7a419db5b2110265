# SPDX-License-Identifier: Apache-2.0
"""What holds of any bytes sent to an environment; `test_ws_frames.py` tries it.

    frames    the messages and the close code are those of `websockets`' sans-I/O `ServerProtocol`,
              however the bytes are cut, unmasked by its C extension or by our own code
    heads     a handshake that we take is one that `websockets` takes, with the same answer
    messages  whatever is sent to `/ws` or `/mcp`, each message has its answer, in turn, or the
              connection is closed with a code that says why: never silence
    bytes     whatever is sent to the port, the connection ends when the client has, and the next
              client is served

Where we differ from `websockets` on purpose, see `DIFFERENCES`.
"""

import codecs
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from openenvd.env_host.shard.connections import owner_of, read_head
from openenvd.env_host.websocket.frames import FrameError, FrameParser, code_of_close, whole_text
from openenvd.env_host.websocket.handshake import acceptance, parse_upgrade
from openenvd.system.net.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    upgrade_request,
)

from ..hosts import Host
from ..raw import FrameSpec, Raw, opened, raw

MAX_BYTES = 1 << 16  # of a message, where frames are compared
CLOSE_CODES = frozenset({1000, 1001, 1002, 1005, 1007, 1009})  # 1011 would be a surprise
MAX_NESTED = 150

DIFFERENCES = """
  - A length that is not minimal, or has its top bit set, is refused with 1002.
  - A frame is refused by its head, before its payload has come.
  - A control frame that is too long is refused with 1002 however long it is, and so are reserved
    bits and a fragment out of order: `websockets` looks at the length first.
  - A control frame between fragments does not count towards the size of their message.
  - A close frame between fragments is an ordinary close: `websockets` answers it with 1002.
  - A text in fragments that cannot become UTF-8 any more is refused at once; `websockets` leaves
    looking at texts to its callers.
  - A close frame with a wrong code and a wrong reason is answered with 1002: `websockets` looks at
    the reason first.
  - The answer to a close frame has its code, without its reason.
"""


# Frames


sizes = st.one_of(
    st.integers(0, 10),
    st.sampled_from((125, 126, 127, 1000, MAX_BYTES - 1, MAX_BYTES, MAX_BYTES + 1)),
)
payloads = st.one_of(
    st.binary(max_size=130),
    st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")),
    sizes.map(lambda size: b"x" * size),
)
close_payloads = st.one_of(
    st.just(b""),
    st.binary(max_size=4),
    st.tuples(st.integers(900, 5100), st.text(max_size=40)).map(
        lambda it: it[0].to_bytes(2, "big") + it[1].encode(errors="surrogatepass")
    ),
)
plain_frames = st.one_of(
    st.builds(FrameSpec, st.sampled_from((TEXT, BINARY)), payloads, st.booleans()),
    st.builds(FrameSpec, st.just(CONTINUATION), payloads, st.booleans()),
    st.builds(FrameSpec, st.sampled_from((PING, PONG)), st.binary(max_size=125)),
    st.builds(FrameSpec, st.just(CLOSE), close_payloads),
)
odd_frames = st.builds(
    FrameSpec,
    opcode=st.integers(0, 15),
    payload=payloads,
    fin=st.booleans(),
    reserved=st.sampled_from((0, 0, 0, 1, 2, 4, 7)),
    masked=st.sampled_from((True, True, True, False)),
    length_bytes=st.sampled_from((0, 0, 0, 2, 8)),
    announced=st.sampled_from((None, None, None, 0, 130, 1 << 20, 1 << 62, 1 << 63, (1 << 64) - 1)),
)


@st.composite
def fragmented(draw: st.DrawFn) -> list[FrameSpec]:
    """A message in fragments, cut anywhere, with control frames between them."""
    payload = draw(payloads)
    cuts = sorted(draw(st.lists(st.integers(0, len(payload)), max_size=4)))
    ends = [*cuts, len(payload)]
    found, start = [], 0
    for number, end in enumerate(ends):
        opcode = CONTINUATION if number else draw(st.sampled_from((TEXT, BINARY)))
        found.append(FrameSpec(opcode, payload[start:end], number == len(ends) - 1))
        if draw(st.booleans()):
            found.append(FrameSpec(PING, b"between"))
        start = end
    return found


frame_lists = st.lists(
    st.one_of(plain_frames.map(lambda it: [it]), fragmented(), odd_frames.map(lambda it: [it])),
    min_size=1,
    max_size=8,
).map(lambda groups: [each for group in groups for each in group])
cuts = st.lists(st.integers(1, 200), max_size=12)


def pieces_of(data: bytes, lengths: Iterable[int]) -> list[bytes]:
    """Cut data into pieces of these lengths, and the rest."""
    found, start = [], 0
    for length in lengths:
        found.append(data[start : start + length])
        start += length
    return [piece for piece in (*found, data[start:]) if piece]


class Seen(NamedTuple):
    """What was understood: messages and control frames, and the close code if there is one."""

    events: list[tuple[int, bytes]]
    code: int | None
    is_breach: bool = False


def seen_by_us(pieces: Iterable[bytes]) -> Seen:
    """What our parser makes of the pieces, up to a close frame or a breach of the protocol."""
    parser = FrameParser(MAX_BYTES)
    events: list[tuple[int, bytes]] = []
    for piece in pieces:
        breach = None
        try:
            found = parser.feed(piece)
        except FrameError as exc:
            found, breach = exc.before, exc
        for kind, payload in found:
            if kind == CLOSE:
                try:
                    return Seen(events, code_of_close(payload))
                except FrameError as exc:
                    return Seen(events, exc.code, is_breach=True)
            events.append((kind, payload))
        if breach is not None:
            return Seen(events, breach.code, is_breach=True)
    return Seen(events, None)


def seen_by_websockets(specs: list[FrameSpec]) -> Seen:
    """What `websockets` makes of these frames."""
    has_control = any(spec.opcode >= CLOSE for spec in specs)  # they would count as fragments
    protocol = ServerProtocol(state=State.OPEN, max_size=None if has_control else MAX_BYTES)
    if data := b"".join(spec.encode() for spec in specs):
        protocol.receive_data(data)
    events: list[tuple[int, bytes]] = []
    parts, kind = b"", 0
    for frame in protocol.events_received():
        assert isinstance(frame, Frame)
        if frame.opcode in (PING, PONG):
            events.append((int(frame.opcode), bytes(frame.data)))
        elif frame.opcode != CLOSE:
            kind = kind if frame.opcode == CONTINUATION else int(frame.opcode)
            parts += frame.data
            if frame.fin:
                events.append((kind, parts))
                parts = b""
    if protocol.parser_exc is not None:
        code = protocol.close_sent.code if protocol.close_sent else 1006
        return Seen(events, int(code), is_breach=True)
    return Seen(events, None if protocol.close_rcvd is None else int(protocol.close_rcvd.code))


def check_frames(specs: list[FrameSpec], lengths: list[int]) -> None:
    """Compare both parsers on these frames; `AssertionError` says where they differ.

    Behind a frame that announces another length than it has, nothing is where `specs` say.
    """
    for number, spec in enumerate(specs):
        if spec.announced not in (None, len(spec.payload)):
            specs = [*specs[:number], replace(spec, payload=spec.payload[: spec.announced])]
            break
    pieces = pieces_of(b"".join(spec.encode() for spec in specs), lengths)
    found, expected = seen_by_us(pieces), expected_of(specs)
    assert found == expected, f"{found} instead of {expected}"
    whole = whole_text(b"".join(pieces))
    assert whole is None or found == Seen([(TEXT, whole)], None)


def expected_of(specs: list[FrameSpec]) -> Seen:
    """What `websockets` sees, but for `DIFFERENCES`; no frame counts behind one that ends it."""
    fragments: bytes | None = None
    kind = 0
    for number, spec in enumerate(specs):
        before = seen_by_websockets(specs[:number])
        if (code := _refusal_by_head(spec, fragments)) is not None:
            has_control = any(each.opcode >= CLOSE for each in specs[:number])
            if spec.announced is None and spec.is_minimal and not (code == 1009 and has_control):
                assert seen_by_websockets(specs[: number + 1]).is_breach
            return Seen(before.events, code, is_breach=True)
        if spec.size > len(spec.payload):  # it has not come whole
            return before
        if spec.opcode == CLOSE:
            code_alone = seen_by_websockets([replace(spec, payload=spec.payload[:2])])
            end = code_alone if code_alone.is_breach else seen_by_websockets([spec])
            return end._replace(events=before.events)
        if spec.opcode >= CLOSE:
            continue
        kind = kind if spec.opcode == CONTINUATION else spec.opcode
        is_fragment = fragments is not None or not spec.fin
        fragments = (fragments or b"") + spec.payload
        if kind == TEXT and is_fragment and not _may_become_utf8(fragments, spec.fin):
            return Seen(before.events, 1007, is_breach=True)
        fragments = None if spec.fin else fragments
    return seen_by_websockets(specs)


def _refusal_by_head(spec: FrameSpec, fragments: bytes | None) -> int | None:
    is_control = spec.opcode >= CLOSE
    is_wrong = (
        not spec.masked
        or spec.reserved
        or spec.opcode not in (CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG)
        or (is_control and (spec.size > 125 or not spec.fin))
        or (not is_control and (spec.opcode == CONTINUATION) is (fragments is None))
        or not spec.is_minimal
    )
    if is_wrong:
        return 1002
    return 1009 if not is_control and len(fragments or b"") + spec.size > MAX_BYTES else None


def _may_become_utf8(text: bytes, is_whole: bool) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text, is_whole)
    except UnicodeDecodeError:
        return False
    return True


# Heads

TOKENS = ("websocket", "Upgrade", "keep-alive, Upgrade", "13", "dGhlIHNhbXBsZSBub25jZQ==", "")
NAMES = ("Host", "Upgrade", "Connection", "Origin", "Content-Length", "Transfer-Encoding", "")
SOCKET_NAMES = ("Sec-WebSocket-Version", "Sec-WebSocket-Key", "Sec-WebSocket-Extensions", " folded")
names = st.sampled_from((*NAMES, *SOCKET_NAMES))
header_lines = st.one_of(
    st.tuples(names, st.one_of(st.sampled_from(TOKENS), st.text(max_size=12))).map(": ".join),
    st.text(max_size=30),
)
GOOD_HEADERS = (
    "Host: localhost",
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
request_lines = st.one_of(
    st.sampled_from(
        ("GET /ws HTTP/1.1", "GET /mcp?session_id=%ff&session_id= HTTP/1.1", "GET /ws?%00;=&&=")
    ),
    st.text(max_size=20).map(lambda text: f"GET /ws?{text} HTTP/1.1"),
    st.text(max_size=30),
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A handshake with lines changed, left out, repeated and added."""
    lines = list(GOOD_HEADERS)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 1))] = [draw(header_lines)]
    text = "\r\n".join([draw(request_lines), *lines]) + "\r\n\r\n"
    return text.encode(draw(st.sampled_from(("utf-8", "latin-1"))), errors="replace")


def check_head(head: bytes) -> None:
    """A head of ours is one of `websockets`, too; what it asks for can be read in any."""
    owner_of(read_head(head).session_id or "")
    upgrade = parse_upgrade(head)
    if upgrade is None:
        return
    upgrade.parameter("session_id")
    protocol = ServerProtocol()
    protocol.receive_data(head)
    events = protocol.events_received()
    assert events, protocol.handshake_exc or protocol.parser_exc
    [request] = events
    assert isinstance(request, Request)
    response = protocol.accept(request)
    assert response.status_code == 101, protocol.handshake_exc
    assert response.headers["Sec-WebSocket-Accept"].encode() in acceptance(upgrade)


# Messages


class Kind(StrEnum):
    """What one client sends."""

    TEXT = "text"
    BINARY = "binary"
    PING = "ping"


@dataclass(frozen=True)
class Item:
    """One message or ping, and where it is cut into fragments."""

    kind: Kind
    payload: bytes
    cuts: tuple[int, ...] = ()

    def encode(self) -> bytes:
        if self.kind is Kind.PING:
            return FrameSpec(PING, self.payload[:125]).encode()
        ends = sorted({min(cut, len(self.payload)) for cut in self.cuts} | {len(self.payload)})
        opcode, found, start = TEXT if self.kind is Kind.TEXT else BINARY, b"", 0
        for end in ends:
            part = FrameSpec(opcode, self.payload[start:end], fin=end == ends[-1])
            found += part.encode()
            opcode, start = CONTINUATION, end
        return found


def deep(depth: int, opening: str, closing: str) -> str:
    """Nested values, or only their beginnings."""
    return opening * depth + closing * depth


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from(("half \ud800", "\0", "reset", "x" * 70_000)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
raw_values = st.one_of(
    json_values.map(json.dumps),
    st.builds(deep, st.sampled_from((5, 150, 500, 990, 5000, 100_000)), st.just("["), st.just("]")),
    st.builds(
        deep, st.sampled_from((5, 990, 50_000)), st.just('{"a":'), st.sampled_from(("}", ""))
    ),
    st.sampled_from((4299, 4300, 4301, 20_000)).map(lambda digits: "-" + "7" * digits),
    st.sampled_from(("1e999", "-1e400", "1e-999", "NaN", "-Infinity", "1" + "0" * 400 + ".5")),
    st.sampled_from(('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\x00"', "-", "01", "tru")),
)
MAX_WAIT_SECONDS = 1.0  # of a step; an environment that is told to wait longer does


def _waits_long(value: str) -> bool:
    try:
        return float(value) > MAX_WAIT_SECONDS
    except ValueError:
        return False


short_waits = raw_values.filter(lambda value: not _waits_long(value))
TYPES = ("reset", "step", "state", "mcp", "close", "nonsense", "")
METHODS = ("tools/list", "tools/call", "openenv/session/create", "openenv/session/close", "none")
VALID = (
    '{"type":"reset"}',
    '{"type":"reset","data":{"seed":3,"episode_id":"e"}}',
    '{"type":"step","data":{"wait_seconds":0}}',
    '{"type":"step","data":{"wait_seconds":0.01}}',
    '{"type":"state"}',
    '{"type":"mcp","data":{"jsonrpc":"2.0","method":"tools/list","id":1}}',
    '{"jsonrpc":"2.0","method":"tools/list","id":2}',
)
texts = st.one_of(
    st.sampled_from(VALID),
    st.sampled_from(VALID),
    st.builds('{{"type":"{}","data":{}}}'.format, st.sampled_from(TYPES), raw_values),
    st.builds('{{"type":{},"data":{{}}}}'.format, raw_values),
    st.builds('{{"type":"step","data":{{"wait_seconds":{}}}}}'.format, short_waits),
    st.builds('{{"type":"reset","data":{{"seed":{0},"episode_id":{0}}}}}'.format, raw_values),
    st.builds('{{"type":"state","type":"{}",{}:1}}'.format, st.sampled_from(TYPES), raw_values),
    st.builds(
        '{{"jsonrpc":"2.0","method":"{}","id":{},"params":{}}}'.format,
        st.sampled_from(METHODS), raw_values, raw_values,
    ),
    st.builds(
        '{{"type":"mcp","data":{{"jsonrpc":"2.0","method":"{}","id":{},"params":{{"name":{}}}}}}}'.format,
        st.sampled_from(METHODS), raw_values, raw_values,
    ),
    raw_values,
    st.text(max_size=30),
).map(lambda text: text.encode(errors="surrogatepass"))  # fmt: skip
items = st.one_of(
    st.builds(Item, st.just(Kind.TEXT), texts, st.lists(st.integers(0, 60), max_size=3).map(tuple)),
    st.builds(Item, st.just(Kind.TEXT), texts),
    st.builds(Item, st.just(Kind.PING), st.binary(max_size=20)),
    st.builds(Item, st.sampled_from((Kind.TEXT, Kind.BINARY)), st.binary(max_size=20)),
)
QUICK = (b'{"type":"state"}', b"{", b"[" * 1000, b"7" * 5000, b'{"type":"\\ud800"}', b"")
quick_items = st.builds(Item, st.just(Kind.TEXT), st.sampled_from(QUICK))
SLOW = Item(Kind.TEXT, b'{"type":"step","data":{"wait_seconds":0.05}}')
conversations = st.one_of(
    st.lists(items, min_size=1, max_size=8),
    st.lists(items, min_size=1, max_size=4).map(lambda rest: [SLOW, *rest]),
    st.tuples(quick_items, st.sampled_from((20, 300))).map(lambda it: [SLOW, *[it[0]] * it[1]]),
)
LAST = {
    "/ws": b'{"type":"the last"}',  # not `state`, which fails after some resets
    "/mcp": b'{"jsonrpc":"2.0","method":"nothing","id":"the last"}',
}
_UNREADABLE = ("INVALID_JSON", -32700)
_ENDED = ("SESSION_ERROR", -32000)


def receive(client: Raw) -> tuple[int, bytes]:
    """Receive one frame; a close code 1006 stands for an end without a close frame."""
    try:
        return client.receive()
    except TimeoutError:
        raise AssertionError("silence") from None
    except (AssertionError, ConnectionError):
        return CLOSE, (1006).to_bytes(2, "big")


def check_conversation(host: Host, path: str, conversation: list[Item], lengths: list[int]) -> None:
    """Send it all without waiting, and read: an answer to each message, or a close that is due."""
    last = Item(Kind.TEXT, LAST[path])
    data = b"".join(item.encode() for item in (*conversation, last))
    sent = [item.payload for item in (*conversation, last) if item.kind is Kind.TEXT]
    with opened(host, path) as client:
        pieces = pieces_of(data, lengths)
        sender = threading.Thread(target=client.send_what_is_taken, args=(pieces,))
        sender.start()
        answers, code = _answers(client, len(sent))
    sender.join()
    for payload, answer in zip(sent, answers, strict=False):
        _check_answer(payload, answer)
    if code is not None:
        assert code in CLOSE_CODES, f"closed with {code}"
        assert any(_may_end(item, path) for item in conversation), f"closed with {code} unasked"
    else:
        assert len(answers) == len(sent), f"{len(answers)} answers to {len(sent)} messages"


def _answers(client: Raw, count: int) -> tuple[list[Any], int | None]:
    """So many answers, the last of them to `LAST`; the close code, if the server closes."""
    found: list[Any] = []
    while len(found) < count or not _is_last(found[-1]):
        opcode, payload = receive(client)
        if opcode == TEXT:
            found.append(json.loads(payload))
        elif opcode == CLOSE:
            return found, int.from_bytes(payload[:2], "big") if payload else 1005
        else:
            assert opcode == PONG
    return found, None


def _is_last(answer: Any) -> bool:
    message = (answer.get("data") or {}).get("message", "")
    return bool("the last" in message or answer.get("id") == "the last")


def _check_answer(payload: bytes, answer: Any) -> None:
    """JSON is understood, and nothing else, as far as the standard library can tell."""
    if payload.count(b"[") + payload.count(b"{") > MAX_NESTED:  # depends on the stack
        return
    error = answer.get("error") or answer.get("data") or {}
    if error.get("code") in _ENDED:  # by a binary message, which has no answer of its own
        return
    try:
        json.loads(payload)
    except ValueError:
        is_json = False
    else:
        is_json = True
    is_unreadable = error.get("code") in _UNREADABLE
    assert is_json is not is_unreadable, f"{payload[:200]!r} was answered {str(answer)[:200]}"


def _may_end(item: Item, path: str) -> bool:
    """Whether a server may close after it: binary, no UTF-8, no object, or asked to."""
    if item.kind is not Kind.TEXT:
        return item.kind is Kind.BINARY
    try:
        message = json.loads(item.payload.decode())  # bytes might be taken for UTF-16 or UTF-32
    except UnicodeDecodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return path == "/ws" and (not isinstance(message, dict) or message.get("type") == "close")


# Bytes

streams = st.lists(
    st.one_of(
        st.binary(max_size=200),
        heads(),
        st.just(upgrade_request("localhost", "/ws")),
        frame_lists.map(lambda specs: b"".join(spec.encode() for spec in specs)),
        st.sampled_from((b"\r\n\r\n", b"GET /ws", b"POST /step HTTP/1.1\r\n", b"GET /mcp?")),
    ),
    max_size=5,
)


def check_stream(host: Host, parts: list[bytes]) -> None:
    """Whatever is sent: once the client has nothing more to say, the connection ends."""
    with raw(host) as client:
        try:
            for part in parts:
                client.send(part)
            client.connection.shutdown(socket.SHUT_WR)
            while client.connection.recv(1 << 16):
                pass
        except TimeoutError:
            raise AssertionError("the connection stays open") from None
        except OSError:
            pass  # reset, as it may be
    assert host.http("GET", "/health")[0] == 200


def try_examples(check: Callable[..., None], examples: int, *given_: SearchStrategy[Any]) -> None:
    """Call `check` with so many examples; raises the smallest that fails, with its values.

    Args:
        check: raises `AssertionError` where what it states does not hold.
        examples: how many; always the same.
        given_: the strategies of its arguments.
    """
    tried = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )

    def try_one(values: tuple[Any, ...]) -> None:
        check(*values)

    tried(given(st.tuples(*given_))(try_one))()
