# SPDX-License-Identifier: Apache-2.0
"""One generator: a process that opens its share of a batch's sessions and reports what it saw.

    crew ──stdin──▶ {"batch": …}               generator ──stdout──▶ {"prepared": true}
                    {"go": monotonic time}                           {"ended": n, "held": n}  ticks
                    {"release": true}                                {"done": …}    with outcomes
    end of stdin: the crew exited, and the generator does too

Lines of JSON. The clock is `time.monotonic`, which all processes of a machine share: every
generator starts at the same moment and counts from it.

At most `window` handshakes are under way at once, well below the server's queue of connections:
the kernel drops what does not fit and tries again after one second, which would measure the
kernel. Time spent waiting for the window counts as connecting. A retried handshake is
counted (`retransmits`), and so are source ports that had run out (`port_retries`).
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

from ..system.proc import raise_fd_limit
from ..system.units import MB
from .http_session import HttpScript, HttpSession
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
    window: int
    sources: tuple[str, ...] = ()  # addresses to connect from; empty: the system chooses
    hold: bool = False  # after the reset, until released

    def sessions(self) -> Callable[[Generator, float], MeasuredSession]:
        """What makes its sessions."""
        authority = f"{self.host}:{self.port}"
        if self.mode == "http":
            script = HttpScript(authority, self.path, self.action)
            return lambda owner, at: HttpSession(script, owner, at)
        ws_script, hold = WsScript(authority, self.path, self.action), self.hold
        return lambda owner, at: WsSession(ws_script, owner, at, hold=hold)


class Generator:
    """Runs one batch; the owner of its sessions."""

    def __init__(self, batch: Batch, say: Callable[[Json], None]) -> None:
        self._batch = batch
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._sources = itertools.cycle(batch.sources or ("",))
        self._sessions: list[MeasuredSession] = []
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
        await self._open_all(make, started_at)
        await self._all_over.wait()
        timer.cancel()
        ticking.cancel()
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
        if not session.is_admitted:
            self.admitted()
        if self._ended == self._batch.count:
            self._all_over.set()

    async def _open_all(
        self, make: Callable[[Generator, float], MeasuredSession], started_at: float
    ) -> None:
        connecting: set[asyncio.Task[None]] = set()
        for _ in range(self._batch.count):
            while self._in_window >= self._batch.window:
                self._room.clear()
                await self._room.wait()
            self._in_window += 1
            session = make(self, started_at)
            self._sessions.append(session)
            if self._is_late:
                self._fail_late(session)
                continue
            task = self._loop.create_task(self._connect(session))
            connecting.add(task)
            task.add_done_callback(connecting.discard)

    async def _connect(self, session: MeasuredSession) -> None:
        try:
            connected = await self._open_socket()
            if session.is_over:  # out of time meanwhile
                connected.close()
                return
            session.outcome.retransmits = _retransmits(connected)
            await self._loop.create_connection(lambda: session, sock=connected)
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
            session.fail(name.lower(), exc.strerror or str(exc))

    async def _open_socket(self) -> socket.socket:
        for attempt in range(PORT_ATTEMPTS):
            opened = socket.socket()
            try:
                opened.setblocking(False)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if source := next(self._sources):
                    if sys.platform == "linux":
                        opened.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                    opened.bind((source, 0))
                await self._loop.sock_connect(opened, (self._batch.host, self._batch.port))
            except OSError as exc:
                opened.close()
                if exc.errno != errno.EADDRNOTAVAIL or attempt == PORT_ATTEMPTS - 1:
                    raise
                self._port_retries += 1
            else:
                return opened
        raise AssertionError("the last attempt returns or raises")

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
