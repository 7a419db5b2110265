# SPDX-License-Identifier: Apache-2.0
"""One generator: a process that opens its share of a batch's sessions and reports what it saw.

    crew ──stdin──▶ {"batch": …}               generator ──stdout──▶ {"prepared": true}
                    {"go": monotonic time}                           {"ended": n, "held": n}  ticks
                    {"release": true}                                {"done": …}    with outcomes
    end of stdin: the crew exited, and the generator does too

Lines of JSON. The clock is `time.monotonic`, which all processes of a machine share: every
generator starts at the same moment and counts from it.

    without a window   the sockets are made beforehand; at `go`, all are connected in one loop,
                       and only then is anything read or written
    with a window      at most so many handshakes are under way; waiting for it is connecting too

A burst fills the server's queue of connections, and the kernel drops what does not fit and tries
again after one second: as with training code that opens its sessions in one `gather`. A window
well below that queue hides it. A retried handshake is counted (`retransmits`), and so are source
ports that had run out (`port_retries`).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import uvloop

from ..system.access_tokens import bearer_header
from ..system.proc import raise_fd_limit
from ..system.units import MB
from .http_session import HttpScript, HttpSession
from .plan import HANDSHAKE_SECONDS
from .session import MeasuredSession
from .ws_session import WsScript, WsSession

Json = dict[str, Any]

TICK_SECONDS = 0.25
PORT_ATTEMPTS = 8
_MAX_LINE_BYTES = MB
# Linux: `connect` chooses the port, knowing both ends; `bind` would use one up for all ends.
_IP_BIND_ADDRESS_NO_PORT = 24
_RETRANSMITS_AT = 100  # `tcpi_total_retrans` in Linux's `struct tcp_info`


@dataclass(frozen=True, slots=True)
class Batch:
    """One generator's share of a batch."""

    mode: str  # "ws" or "http"
    host: str
    port: int
    path: str  # what comes in front of `/ws`, `/reset`, `/step`
    count: int
    action: Json
    timeout_seconds: float
    window: int  # handshakes under way at once; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade
    sources: tuple[str, ...] = ()  # addresses to connect from; empty: the system chooses
    hold: bool = False  # after the reset, until released
    token: str | None = None  # that the server wants
    others: tuple[tuple[str, int], ...] = ()  # the server's further addresses, for other shares

    def sessions(self) -> Callable[[Generator, float], MeasuredSession]:
        """What makes its sessions."""
        authority = f"{self.host}:{self.port}"
        headers = "".join(f"{k}: {v}\r\n" for k, v in bearer_header(self.token).items())
        if self.mode == "http":
            script = HttpScript(authority, self.path, self.action, headers)
            return lambda owner, at: HttpSession(script, owner, at)
        ws_script, hold = WsScript(authority, self.path, self.action, headers), self.hold
        return lambda owner, at: WsSession(ws_script, owner, at, hold=hold)


class Generator:
    """Runs one batch; the owner of its sessions."""

    def __init__(self, batch: Batch, say: Callable[[Json], None]) -> None:
        self._batch = batch
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._sources = itertools.cycle(batch.sources or ("",))
        self._address = _resolved(batch.host, batch.port)
        self._prepared = (
            [] if batch.window else [new_socket(next(self._sources)) for _ in range(batch.count)]
        )
        self._sessions: list[MeasuredSession] = []
        self._connecting: dict[MeasuredSession, asyncio.Task[None]] = {}
        self._may_expire = 0  # the first session whose handshake may still be under way
        self._in_window = 0
        self._room = asyncio.Event()
        self._all_over = asyncio.Event()
        self._ended = self._held = self._port_retries = 0
        self._worst_lag_seconds = 0.0
        self._is_late = False

    async def run(self, started_at: float) -> Json:
        """Run the session from `started_at` on; returns its outcome."""
        make = self._batch.sessions()
        await asyncio.sleep(started_at - time.monotonic())
        cpu = time.process_time()
        ticking = self._loop.create_task(self._tick())
        deadline = started_at + self._batch.timeout_seconds
        timer = self._loop.call_later(deadline - time.monotonic(), self._out_of_time)
        if self._batch.window:
            expiring = self._loop.create_task(self._expire_handshakes())
            await self._open_in_window(make, started_at)
        else:
            self._open_at_once(make, started_at)
            expiring = self._loop.create_task(self._expire_handshakes())
        await self._all_over.wait()
        timer.cancel()
        ticking.cancel()
        expiring.cancel()
        return {
            "cpu_seconds": time.process_time() - cpu,
            "wall_seconds": time.monotonic() - started_at,
            "worst_lag_seconds": self._worst_lag_seconds,
            "port_retries": self._port_retries,
            "outcomes": [asdict(session.outcome) for session in self._sessions],
        }

    def release(self) -> None:
        """Let sessions that are held continue."""
        for session in self._sessions:
            session.release()

    def admitted(self) -> None:
        """Another handshake may begin; called once for each session at most."""
        self._in_window -= 1
        self._room.set()

    def held(self) -> None:
        """Count a session that was reset and waits to be released."""
        self._held += 1

    def ended(self, session: MeasuredSession) -> None:
        """Count a session that is over, well or not; called once for each."""
        self._ended += 1
        if (connecting := self._connecting.get(session)) is not None:
            connecting.cancel()
        if not session.is_admitted:
            self.admitted()
        if self._ended == self._batch.count:
            self._all_over.set()

    def _open_at_once(
        self, make: Callable[[Generator, float], MeasuredSession], started_at: float
    ) -> None:
        """Connect all sockets in one go; everything else comes after the last of them."""
        sessions = [make(self, started_at) for _ in range(self._batch.count)]
        self._sessions += sessions
        self._in_window = len(sessions)
        self._prepared.reverse()
        connecting = []
        for session in sessions:
            session.dialled_at = started_at
            connecting.append((session, self._dial(session, self._prepared.pop())))
        for session, opened in connecting:
            if opened is not None:
                self._begin(session, opened)

    async def _open_in_window(
        self, make: Callable[[Generator, float], MeasuredSession], started_at: float
    ) -> None:
        for _ in range(self._batch.count):
            while self._in_window >= self._batch.window:
                self._room.clear()
                await self._room.wait()
            self._in_window += 1
            session = make(self, started_at)
            session.dialled_at = time.monotonic()
            self._sessions.append(session)
            if self._is_late:
                self._fail_late(session)
            elif (opened := self._dial(session, new_socket(next(self._sources)))) is not None:
                self._begin(session, opened)

    def _begin(self, session: MeasuredSession, opened: socket.socket) -> None:
        task = self._loop.create_task(self._connect(session, opened))
        self._connecting[session] = task
        task.add_done_callback(lambda _: self._connecting.pop(session))

    async def _connect(self, session: MeasuredSession, opened: socket.socket) -> None:
        try:
            try:
                await self._loop.sock_connect(opened, self._address)
            except OSError as exc:
                if exc.errno != errno.EISCONN:
                    raise
            session.outcome.retransmits = _retransmits(opened)
            await self._loop.create_connection(lambda: session, sock=opened)
        except OSError as exc:
            opened.close()
            _fail_of_os(session, exc)
        except asyncio.CancelledError:  # out of time meanwhile
            opened.close()
            raise

    def _dial(self, session: MeasuredSession, opened: socket.socket) -> socket.socket | None:
        """Begin to connect; return the socket, or None when the session has failed."""
        for _ in range(PORT_ATTEMPTS):
            code = opened.connect_ex(self._address)
            if code in (0, errno.EINPROGRESS):
                return opened
            opened.close()
            if code != errno.EADDRNOTAVAIL:
                break
            self._port_retries += 1
            opened = new_socket(next(self._sources))
        opened.close()
        _fail_of_os(session, OSError(code, os.strerror(code)))
        return None

    async def _expire_handshakes(self) -> None:
        """Fail each session whose handshake takes too long; the oldest is the first."""
        most = self._batch.handshake_seconds
        while self._may_expire < self._batch.count:
            if self._may_expire == len(self._sessions):  # the window has let in no more
                await asyncio.sleep(most)
                continue
            session = self._sessions[self._may_expire]
            if not (session.is_over or session.is_connected):
                if (left := session.dialled_at + most - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                    continue
                session.fail("handshake_timeout", f"the handshake took over {most:g} s")
            self._may_expire += 1

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._worst_lag_seconds = max(self._worst_lag_seconds, time.monotonic() - due)
            self._say({"ended": self._ended, "held": self._held})

    def _out_of_time(self) -> None:
        self._is_late = True
        for session in self._sessions:
            self._fail_late(session)

    def _fail_late(self, session: MeasuredSession) -> None:
        session.fail("timeout", f"not over after {self._batch.timeout_seconds:g} s")


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


def _resolved(host: str, port: int) -> tuple[str, int]:
    """Look a name up, once."""
    found = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    address, number = found[0][4][:2]
    return str(address), int(number)


def _fail_of_os(session: MeasuredSession, exc: OSError) -> None:
    name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
    session.fail(name.lower(), exc.strerror or str(exc))


def _retransmits(connected: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITS_AT + 4)
    return int(struct.unpack_from("I", info, _RETRANSMITS_AT)[0]) if len(info) > 100 else 0


def _say(message: Json) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


async def _serve() -> None:
    """Batch after batch, until the crew closes our stdin."""
    lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    running: asyncio.Task[None] | None = None
    generator: Generator | None = None
    while line := await lines.readline():
        message = orjson.loads(line)
        if "batch" in message:
            generator = Generator(Batch(**message["batch"]), _say)
            _say({"prepared": True})
        elif generator is not None and "go" in message:
            running = loop.create_task(_run(generator, message["go"]))
        elif generator is not None and "release" in message:
            generator.release()
    if running is not None:
        running.cancel()


async def _run(generator: Generator, started_at: float) -> None:
    gc.collect()
    gc.disable()
    try:
        _say({"done": await generator.run(started_at)})
    finally:
        gc.enable()


def main() -> None:
    """The program."""
    raise_fd_limit()
    uvloop.run(_serve())
    os._exit(0)  # sockets of an unfinished batch need no orderly end


if __name__ == "__main__":
    main()
