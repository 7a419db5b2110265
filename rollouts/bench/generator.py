# SPDX-License-Identifier: Apache-2.0
"""One generator: a process that runs its share of a batch's sessions and reports the outcomes.

    crew ──stdin──▶ {"batch": …}               generator ──stdout──▶ {"prepared": true}
                    {"go": monotonic time}                           {"done": …}    with outcomes
    end of stdin: the crew exited, and the generator does too

Each message is a line of JSON; the crew writes one at a time. The clock is `time.monotonic`, which
all processes of a machine share: every generator starts at the same moment and counts from it.

    without a window   at `go` all sockets, which exist already, are connected in one loop; reads
                       and writes begin after that
    with a window      at most `window` handshakes at once; the wait for one counts as connecting

Without a window, the burst fills the server's queue of connections; the kernel drops what does not
fit, and tries again after one second. Training code that opens its sessions in one `gather` sees
the same. A window well below the length of that queue hides this effect.

A session goes through its phases on a WebSocket as light as Python allows:

    connect ─▶ upgrade ─▶ reset ─▶ step ─▶ close message, close frame ─▶ the server's close

The WebSocket client is written by hand (docs/decisions/0019-bench-sessions.md): every session of a
batch sends the same bytes, which are made once. The mask is zero, which leaves a payload as it is.

The total and the connect time count from the start of the batch, not from the moment at which this
process began the session: otherwise the delay of a late generator would be missing.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

import orjson
import uvloop

from ...system.net import websocket
from ...system.net.access import bearer_header
from ...system.process.proc import raise_fd_limit
from ...system.text.json_lines import Json

HANDSHAKE_SECONDS = 10.0  # the limit of upstream's client (`connect_timeout_s`)
# Linux: `connect` chooses the port, knowing both ends; `bind` would reserve one for all peers.
_IP_BIND_ADDRESS_NO_PORT = 24
MAX_MESSAGE_CHARS = 300  # of an error
RESET = websocket.unmasked_client_frame(b'{"type":"reset","data":{}}')
CLOSE_FRAME = websocket.unmasked_client_frame(
    websocket.close_payload(websocket.NORMAL_CLOSE), websocket.CLOSE
)
_CLOSING = websocket.unmasked_client_frame(b'{"type":"close"}') + CLOSE_FRAME


@dataclass(frozen=True, slots=True)
class Batch:
    """One generator's share of a batch."""

    host: str
    port: int
    path: str  # the part before `/ws`
    count: int
    action: Json
    timeout_seconds: float
    window: int  # handshakes under way at once; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade
    sources: tuple[str, ...] = ()  # addresses to connect from; empty: the system chooses
    token: str | None = None  # that the server requires
    others: tuple[tuple[str, int], ...] = ()  # the server's further addresses, for other shares


class Connection(asyncio.Protocol):
    """One connection. A subclass defines what follows on each event: the methods `on_…`."""

    def __init__(self, opening: bytes) -> None:
        self.is_closed = False  # closed on this side: later data is ignored
        self._transport: asyncio.Transport | None = None
        self._opening = opening  # the request for the upgrade
        self._is_open = False
        self._unread = b""
        self._text = b""  # of a message in several frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade, unless the connection was closed while it was made."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if self.is_closed:
            transport.close()
        else:
            self.write(self._opening)

    def data_received(self, data: bytes) -> None:
        """Read the answer to the upgrade, then frames."""
        data = self._unread + data if self._unread else data
        start = 0
        if not self._is_open:
            if (end := data.find(b"\r\n\r\n")) < 0:
                self._unread = data
                return
            head = data[:end].decode("latin-1")
            if not head.startswith("HTTP/1.1 101"):
                self.on_refused(head.partition("\r\n")[0])
                self.close()
                return
            self._is_open, start = True, end + 4
            self.on_open(head)
        while not self.is_closed and (found := parse_frame(data, start)) is not None:
            opcode, is_last, payload, start = found
            if opcode == websocket.PING:
                self.write(websocket.unmasked_client_frame(payload, websocket.PONG))
            elif opcode == websocket.CLOSE:
                code = int.from_bytes(payload[:2], "big") or websocket.NO_CODE_CLOSE
                self.on_close(code, payload[2:].decode("utf-8", "replace"))
            elif opcode != websocket.PONG:
                self._text += payload
                if is_last:
                    text, self._text = self._text, b""
                    self.on_message(text)
        self._unread = data[start:]

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def on_open(self, head: str) -> None:
        """React to the head of the answer that grants the upgrade."""

    def on_refused(self, line: str) -> None:
        """React to the first line of another answer."""

    def on_message(self, text: bytes) -> None:
        """React to a whole message."""

    def on_close(self, code: int, reason: str) -> None:
        """React to the server's close frame."""


@dataclass(slots=True)
class Outcome:
    """The result of one session; latencies are None for phases that it did not complete."""

    connect_seconds: float | None = None
    reset_seconds: float | None = None
    step_seconds: float | None = None
    total_seconds: float = 0.0
    observation: Json | None = None
    error_kind: str | None = None
    error_message: str | None = None


class Session(Connection):
    """One connection from its first byte to its last.

    Args:
        opening: The request for the upgrade.
        step: The frame of the step.
        on_admitted: Called once, when the server has granted the upgrade or the session has ended:
            another handshake may begin.
    """

    def __init__(self, opening: bytes, step: bytes, on_admitted: Callable[[], None]) -> None:
        super().__init__(opening)
        self.outcome = Outcome()
        self.over = asyncio.get_running_loop().create_future()  # done when the session has ended
        self.started_at = 0.0  # of the batch
        self.phase_began_at = 0.0  # when the batch began, or when the last phase ended
        self._step = step
        self._on_admitted = on_admitted

    def on_open(self, head: str) -> None:
        """Ask for a reset."""
        self.outcome.connect_seconds = self._end_phase()
        self._on_admitted()
        self.write(RESET)

    def on_message(self, text: bytes) -> None:
        """Read the answer to the reset or to the step, and send what comes next."""
        try:
            message = orjson.loads(text)
            data = message.get("data") or {}
            if message.get("type") == "error":
                parts = (data.get(name) for name in ("exception", "message", "place"))
                self.fail(
                    str(data.get("code", "error")), ": ".join(str(part) for part in parts if part)
                )
            elif self.outcome.reset_seconds is None:
                self.outcome.reset_seconds = self._end_phase()
                self.write(self._step)
            elif self.outcome.step_seconds is None:
                self.outcome.observation = data["observation"]
                self.outcome.step_seconds = self._end_phase()
                self.write(_CLOSING)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.fail("not_openenv", f"not an answer of an environment: {text[:200]!r}")

    def on_refused(self, line: str) -> None:
        """Fail: there is no session."""
        self.fail("refused", f"the upgrade was answered with {line}")

    def on_close(self, code: int, reason: str) -> None:
        """Record the server's close frame."""
        self._end("closed", f"the server closed with {code} {reason}".rstrip())

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the connection."""
        cause = f": {exc}" if exc else ""
        self._end("connection_lost", f"the server closed the connection{cause}")

    def fail(self, kind: str, message: str) -> None:
        """End it as a failure, unless it has ended."""
        if not self.over.done():
            self.outcome.error_kind = kind
            self.outcome.error_message = message[:MAX_MESSAGE_CHARS]
            self.outcome.total_seconds = time.monotonic() - self.started_at
            self.over.set_result(None)
            if self.outcome.connect_seconds is None:
                self._on_admitted()
            self.close()

    def _end(self, kind: str, message: str) -> None:
        """End the session because the server ended it; it failed only if the step is unanswered."""
        is_answered = self.outcome.step_seconds is not None and self.outcome.error_kind is None
        self.fail(kind, message)
        if is_answered:
            self.outcome.error_kind = self.outcome.error_message = None

    def _end_phase(self) -> float:
        """Return the duration of the phase that ends now."""
        now = time.monotonic()
        seconds, self.phase_began_at = now - self.phase_began_at, now
        return seconds


class Generator:
    """Runs one batch; owns its sessions and their sockets."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        found = socket.getaddrinfo(batch.host, batch.port, socket.AF_INET, socket.SOCK_STREAM)
        self._address = found[0][4]
        headers = "".join(f"{k}: {v}\r\n" for k, v in bearer_header(batch.token).items())
        authority = f"{batch.host}:{batch.port}"
        opening = websocket.upgrade_request(authority, f"{batch.path}/ws", headers)
        step = websocket.unmasked_client_frame(orjson.dumps({"type": "step", "data": batch.action}))
        self._room = asyncio.Semaphore(batch.window or max(1, batch.count))
        self._sessions = [Session(opening, step, self._room.release) for _ in range(batch.count)]
        sources = batch.sources or ("",)
        self._sockets = [new_socket(sources[n % len(sources)]) for n in range(batch.count)]
        self._connecting: dict[Session, asyncio.Task[None]] = {}

    async def run(self, started_at: float) -> Json:
        """Run all sessions from `started_at` on; return their outcomes."""
        batch, sessions = self._batch, self._sessions
        await asyncio.sleep(started_at - time.monotonic())
        cpu = time.process_time()
        for opened in () if batch.window else self._sockets:
            opened.connect_ex(self._address)  # `_connect` raises an error of it
        for session, opened in zip(sessions, self._sockets, strict=True):
            session.started_at = session.phase_began_at = started_at
            self._connecting[session] = asyncio.create_task(self._connect(session, opened))
        if sessions:
            left = started_at + batch.timeout_seconds - time.monotonic()
            await asyncio.wait([session.over for session in sessions], timeout=left)
        wall, cpu = time.monotonic() - started_at, time.process_time() - cpu
        for session in sessions:
            self._fail(session, "timeout", f"not over after {batch.timeout_seconds:g} s")
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        return {
            "cpu_seconds": cpu,
            "wall_seconds": wall,
            "outcomes": [asdict(session.outcome) for session in sessions],
        }

    async def _connect(self, session: Session, opened: socket.socket) -> None:
        """Connect once a handshake may begin; an admitted session lets the next one begin."""
        loop, seconds = asyncio.get_running_loop(), self._batch.handshake_seconds

        def check_admitted() -> None:
            if session.outcome.connect_seconds is None:
                self._fail(session, "handshake_timeout", f"the handshake took over {seconds:g} s")

        try:
            await self._room.acquire()
            dialled_at = time.monotonic() if self._batch.window else session.started_at
            loop.call_at(dialled_at + seconds, check_admitted)
            try:
                await loop.sock_connect(opened, self._address)
            except OSError as exc:
                if exc.errno != errno.EISCONN:
                    raise
            await loop.create_connection(lambda: session, sock=opened)
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
            session.fail(name.lower(), exc.strerror or str(exc))
        finally:
            if session.over.done():
                opened.close()

    def _fail(self, session: Session, kind: str, message: str) -> None:
        """Fail a session unless it is over, also while it connects."""
        session.fail(kind, message)
        self._connecting[session].cancel()


def new_socket(source: str = "") -> socket.socket:
    """Make a socket that connects from an address; `connect` chooses the port."""
    opened = socket.socket()
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source:
        if sys.platform == "linux":
            opened.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        opened.bind((source, 0))
    return opened


def parse_frame(data: bytes, start: int) -> tuple[int, bool, bytes, int] | None:
    """Parse a frame: opcode, whether it ends its message, payload, its end; None: incomplete."""
    if (head := websocket.parse_head(data, start)) is None or len(data) < head[3]:
        return None
    first, _, payload_at, end = head
    return first & websocket.OPCODE, first >= websocket.FIN, data[payload_at:end], end


def _write(message: Json) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


async def _measure(batch: Batch) -> None:
    """Prepare one batch, and run it at the crew's `go`."""
    generator = Generator(batch)
    _write({"prepared": True})
    if line := sys.stdin.buffer.readline():
        # The crew writes nothing while a batch runs: stdin is readable only at its end.
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, os._exit, 1)
        done = await generator.run(orjson.loads(line)["go"])
        loop.remove_reader(sys.stdin)  # the crew may write its next batch once it has the answer
        _write({"done": done})


def main() -> None:
    """Measure batch after batch, until the crew closes stdin."""
    raise_fd_limit()
    gc.disable()  # a collection in the middle of a batch would count as latency
    while line := sys.stdin.buffer.readline():
        uvloop.run(_measure(Batch(**orjson.loads(line)["batch"])))
        os.set_blocking(sys.stdin.fileno(), True)  # uvloop has made it non-blocking
        gc.collect()


if __name__ == "__main__":
    main()
