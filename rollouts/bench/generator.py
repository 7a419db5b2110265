# SPDX-License-Identifier: Apache-2.0
"""One generator: a process that opens its share of a batch's sessions and reports what it saw.

    crew ──stdin──▶ {"batch": …}               generator ──stdout──▶ {"prepared": true}
                    {"go": monotonic time}                           {"done": …}    with outcomes
    end of stdin: the crew exited, and the generator does too

Each message is a line of JSON; the crew writes one at a time. The clock is `time.monotonic`, which
all processes of a machine share: every generator starts at the same moment and counts from it.

    without a window   at `go` all sockets, made beforehand, are connected in one loop, and only
                       then is anything read or written
    with a window      at most `window` handshakes are under way; waiting for it is connecting too

Without a window, the burst fills the server's queue of connections; the kernel drops what does not
fit, and tries again after one second. Training code that opens its sessions in one `gather` sees
the same. A window well below the length of that queue hides it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass

import orjson
import uvloop

from ...system.net.access import bearer_header
from ...system.net.websocket import unmasked_client_frame, upgrade_request
from ...system.process.proc import raise_fd_limit
from ...system.text.json_lines import Json
from .session import Session

HANDSHAKE_SECONDS = 10.0  # as upstream's client gives it (`connect_timeout_s`)
# Linux: `connect` chooses the port, knowing both ends; `bind` would use one up for all ends.
_IP_BIND_ADDRESS_NO_PORT = 24


@dataclass(frozen=True, slots=True)
class Batch:
    """One generator's share of a batch."""

    host: str
    port: int
    path: str  # what comes in front of `/ws`
    count: int
    action: Json
    timeout_seconds: float
    window: int  # handshakes under way at once; 0: all
    handshake_seconds: float = HANDSHAKE_SECONDS  # from connecting to the answered upgrade
    sources: tuple[str, ...] = ()  # addresses to connect from; empty: the system chooses
    token: str | None = None  # that the server wants
    others: tuple[tuple[str, int], ...] = ()  # the server's further addresses, for other shares


class Generator:
    """Runs one batch; the owner of its sessions and their sockets."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        found = socket.getaddrinfo(batch.host, batch.port, socket.AF_INET, socket.SOCK_STREAM)
        self._address = found[0][4]
        headers = "".join(f"{k}: {v}\r\n" for k, v in bearer_header(batch.token).items())
        opening = upgrade_request(f"{batch.host}:{batch.port}", f"{batch.path}/ws", headers)
        step = unmasked_client_frame(orjson.dumps({"type": "step", "data": batch.action}))
        self._room = asyncio.Semaphore(batch.window or max(1, batch.count))
        self._sessions = [Session(opening, step, self._room.release) for _ in range(batch.count)]
        sources = batch.sources or ("",)
        self._sockets = [new_socket(sources[n % len(sources)]) for n in range(batch.count)]
        self._connecting: dict[Session, asyncio.Task[None]] = {}

    async def run(self, started_at: float) -> Json:
        """Run all sessions from `started_at` on; return what they saw."""
        batch, sessions = self._batch, self._sessions
        await asyncio.sleep(started_at - time.monotonic())
        cpu = time.process_time()
        for opened in () if batch.window else self._sockets:
            opened.connect_ex(self._address)  # `_connect` meets the error, if there is one
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
        """Connect once there is room, which the session gives back when it is admitted."""
        loop = asyncio.get_running_loop()
        try:
            await self._room.acquire()
            dialled_at = time.monotonic() if self._batch.window else session.started_at
            loop.call_at(dialled_at + self._batch.handshake_seconds, self._check_admitted, session)
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

    def _check_admitted(self, session: Session) -> None:
        """Fail a session whose handshake takes too long."""
        if session.outcome.connect_seconds is None:
            seconds = self._batch.handshake_seconds
            self._fail(session, "handshake_timeout", f"the handshake took over {seconds:g} s")

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


def _write(message: Json) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


async def _measure(batch: Batch) -> None:
    """Prepare one batch, and run it when the crew says so."""
    generator = Generator(batch)
    _write({"prepared": True})
    if line := sys.stdin.buffer.readline():
        # The crew writes nothing while a batch runs: what can be read is the end of stdin.
        asyncio.get_running_loop().add_reader(sys.stdin, os._exit, 1)
        _write({"done": await generator.run(orjson.loads(line)["go"])})


def main() -> None:
    """Measure batch after batch, until the crew closes our stdin."""
    raise_fd_limit()
    gc.disable()  # a collection in the middle of a batch would count as latency
    while line := sys.stdin.buffer.readline():
        uvloop.run(_measure(Batch(**orjson.loads(line)["batch"])))
        os.set_blocking(sys.stdin.fileno(), True)  # uvloop had changed that
        gc.collect()


if __name__ == "__main__":
    main()
