# SPDX-License-Identifier: Apache-2.0
"""Clients of `held_sessions.py`: one process that opens sessions, holds them, and steps a few.

    stdin:  {"open": {"host", "port", "path", "count", "sources", "window"}}
            {"step": {"share", "seconds", "at", "seed"}}
    stdout: {"opened": n, "failed": n, "why": text}        one line for each
            {"latencies": [seconds], "failed": n, "why": text}

`step` has a random share of the sessions take one step each: all at the moment `at` (of
`time.monotonic`), or spread evenly over the seconds after it. A latency counts from the moment at
which a step was due, not from when this process had time to send it. The end of stdin ends it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from typing import Any, cast

import uvloop

from openenvd.bench.generator import new_socket
from openenvd.bench.ws_session import WsScript, take_frame
from openenvd.system.proc import raise_fd_limit
from openenvd.system.websocket import (
    CLOSE,
    NORMAL_CLOSE,
    PING,
    PONG,
    TEXT,
    close_payload,
    unmasked_client_frame,
)

Json = dict[str, Any]

OPEN_SECONDS = 30.0  # of one session, from its connection to its reset
STEP_SECONDS = 60.0


class HeldSession(asyncio.Protocol):
    """One session that was opened, and waits."""

    def __init__(self, script: WsScript) -> None:
        self._script = script
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unread = b""
        self._is_open = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._script.opening)

    def data_received(self, data: bytes) -> None:
        """Read the answer to the upgrade, then frames."""
        self._unread += data
        if not self._is_open:
            head, end, rest = self._unread.partition(b"\r\n\r\n")
            if not end:
                return
            if not head.startswith(b"HTTP/1.1 101"):
                self._fail(head.partition(b"\r\n")[0].decode("latin-1"))
                return
            self._is_open, self._unread = True, rest
            assert self._transport is not None
            self._transport.write(self._script.reset)
        while (found := take_frame(self._unread, 0)) is not None:
            opcode, _, payload, end_at = found
            self._unread = self._unread[end_at:]
            self._on_frame(opcode, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report it to whoever waits."""
        self._transport = None
        self._fail(f"the connection was lost: {exc}")

    async def opened(self) -> None:
        """Wait for the answer to the reset."""
        await self._answered()

    async def step(self, due: float) -> float:
        """Step once; returns the seconds since it was due."""
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise ConnectionError("the connection was lost before the step")
        due = min(due, time.monotonic())  # a timer may be a little early
        self._transport.write(self._script.step)
        await self._answered()
        return time.monotonic() - due

    def close(self) -> None:
        """End the session."""
        if self._transport is not None:
            self._transport.write(unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE))
            self._transport.close()

    async def _answered(self) -> None:
        answer = await self._answer
        if b'"observation"' not in answer:
            raise ConnectionError(answer[:200].decode(errors="replace"))

    def _on_frame(self, opcode: int, payload: bytes) -> None:
        assert self._transport is not None
        if opcode == PING:
            self._transport.write(unmasked_client_frame(payload, PONG))
        elif opcode == CLOSE:
            self._fail(f"the server closed: {payload!r}")
        elif opcode == TEXT and not self._answer.done():
            self._answer.set_result(payload)

    def _fail(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
            self._answer.exception()  # nobody may be waiting


class Clients:
    """All sessions of this process."""

    def __init__(self) -> None:
        self._held: list[HeldSession] = []
        self._failures: list[str] = []

    async def open(self, asked: Json) -> Json:
        """Open them, not more than `window` at once."""
        script = WsScript(f"{asked['host']}:{asked['port']}", asked["path"], {"wait_seconds": 0.0})
        sources = itertools.cycle(asked["sources"] or [""])
        turns = asyncio.Semaphore(asked["window"])
        address = (asked["host"], asked["port"])

        async def one() -> None:
            async with turns:
                try:
                    async with asyncio.timeout(OPEN_SECONDS):
                        self._held.append(await open_session(script, address, next(sources)))
                except (OSError, TimeoutError) as exc:
                    self._failures.append(repr(exc))

        await asyncio.gather(*(one() for _ in range(asked["count"])))
        return {"opened": len(self._held), **self._failed()}

    async def step(self, asked: Json) -> Json:
        """Have a share of them step."""
        count = round(len(self._held) * asked["share"])
        chosen = random.Random(asked["seed"]).sample(self._held, count)
        apart = asked["seconds"] / max(1, count)
        latencies: list[float] = []

        async def one(session: HeldSession, due: float) -> None:
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    latencies.append(await session.step(due))
            except (OSError, TimeoutError) as exc:
                self._failures.append(repr(exc))

        steps = (one(session, asked["at"] + n * apart) for n, session in enumerate(chosen))
        await asyncio.gather(*steps)
        return {"latencies": latencies, **self._failed()}

    def _failed(self) -> Json:
        failures, self._failures = self._failures, []
        return {"failed": len(failures), "why": failures[0] if failures else ""}


async def open_session(script: WsScript, address: tuple[str, int], source: str = "") -> HeldSession:
    """Connect, and reset."""
    loop = asyncio.get_running_loop()
    opened = new_socket(source)
    try:
        await loop.sock_connect(opened, address)
    except BaseException:
        opened.close()
        raise
    _, session = await loop.create_connection(lambda: HeldSession(script), sock=opened)
    await session.opened()
    return session


async def _serve() -> None:
    """Command after command; the end of stdin is the end."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    clients = Clients()
    while line := await lines.readline():
        message = json.loads(line)
        answer = (
            await clients.open(message["open"])
            if "open" in message
            else await clients.step(message["step"])
        )
        print(json.dumps(answer), flush=True)


def main() -> None:
    """The program."""
    raise_fd_limit()
    uvloop.run(_serve())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # thousands of sockets need no orderly end
