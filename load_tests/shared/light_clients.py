# SPDX-License-Identifier: Apache-2.0
"""Light client sessions, and processes that have many of them.

    LightSession    connects, resets, steps on command, and has the cause of a loss
    open_session    returns a session that has been reset
    Clients         several processes of this module, each with its part of the sessions

    stdin of a process: {"open": {"host", "port", "path", "count", "sources", "window"}}
                        {"step": {"share", "seconds", "at", "seed"}}
    stdout, a line each: {"opened": n, "failed": n, "why": text}
                        {"latencies": [seconds], "failed": n, "why": text}

At `step`, a random share of the open sessions takes one step each: all at the moment `at` (of
`time.monotonic`), or spread evenly over the seconds after it. A latency counts from the moment at
which a step was due, not from the moment of sending.

The process ends at the end of stdin.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from load_tests.shared.client_process import ClientProcess
from openenvd.rollouts.bench.generator import CLOSE_FRAME, RESET, Connection, new_socket
from openenvd.system.net.websocket import unmasked_client_frame, upgrade_request
from openenvd.system.process.proc import raise_fd_limit

Json = dict[str, Any]

STEP = unmasked_client_frame(b'{"type":"step","data":{"wait_seconds":0.0}}')
OPEN_SECONDS = 30.0  # of one session, from its connection to its reset
STEP_SECONDS = 60.0
SOON_SECONDS = 0.2  # until a step is due, so that every client process has read the command


class LightSession(Connection):
    """One session.

    Attributes:
        ended: Done when its connection is lost.
        told: Why the server ended it: the code of an error or of a close, or the status of a
            refusal; `reset` or `eof` if the connection ended without any.
    """

    def __init__(self, authority: str, path: str) -> None:
        super().__init__(upgrade_request(authority, path))
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.told = ""
        self._answer: asyncio.Future[None] = loop.create_future()

    def on_open(self, head: str) -> None:
        self.write(RESET)

    def on_refused(self, line: str) -> None:
        self._fail(line)

    def on_message(self, text: bytes) -> None:
        if b'"error"' in text[:40]:
            self._fail(json.loads(text)["data"]["code"])
        elif not self._answer.done():
            self._answer.set_result(None)

    def on_close(self, code: int, reason: str) -> None:
        """Keep the code of the close, unless an error came before it."""
        self._fail(self.told or f"close {code}")

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session, whatever the reason."""
        self._fail(self.told or ("reset" if exc else "eof"))
        self.ended.set_result(None)

    async def opened(self) -> None:
        await self._answer

    async def step(self, due: float) -> float:
        """Step once; returns the seconds since it was due.

        Raises:
            ConnectionError: The session is lost, or the answer was an error.
        """
        if self.ended.done():
            raise ConnectionError(self.told)
        self._answer = asyncio.get_running_loop().create_future()
        due = min(due, time.monotonic())  # a timer may fire a little early
        self.write(STEP)
        await self._answer
        return time.monotonic() - due

    def end(self) -> None:
        if not self.ended.done():
            self.write(CLOSE_FRAME)
            self.close()

    def _fail(self, told: str) -> None:
        self.told = told
        if not self._answer.done():
            self._answer.set_exception(ConnectionError(told))
            self._answer.exception()  # it counts as retrieved even if no caller waits


async def open_session(host: str, port: int, path: str, source: str = "") -> LightSession:
    """Connect and reset; `path` is an environment's path with its query.

    Raises:
        OSError: The session could not be opened.
    """
    loop = asyncio.get_running_loop()
    before, mark, query = path.partition("?")
    session = LightSession(f"{host}:{port}", f"{before.rstrip('/')}/ws{mark}{query}")
    opened = new_socket(source)
    try:
        await loop.sock_connect(opened, (host, port))
        await loop.create_connection(lambda: session, sock=opened)
    except BaseException:
        opened.close()
        raise
    try:
        await session.opened()
    except BaseException:
        session.end()
        raise
    return session


class Served:
    """All sessions of this process."""

    def __init__(self) -> None:
        self._held: list[LightSession] = []
        self._failures: list[str] = []

    async def open(self, host: str, port: int, path: str, **asked: Any) -> Json:
        """Open sessions, at most `window` at once."""
        sources = itertools.cycle(asked["sources"] or [""])
        turns = asyncio.Semaphore(asked["window"])

        async def one() -> None:
            async with turns:
                try:
                    async with asyncio.timeout(OPEN_SECONDS):
                        self._held.append(await open_session(host, port, path, next(sources)))
                except (OSError, TimeoutError) as exc:
                    self._failures.append(repr(exc))

        await asyncio.gather(*(one() for _ in range(asked["count"])))
        return {"opened": len(self._held), **self._failed()}

    async def step(self, share: float, seconds: float, at: float, seed: int) -> Json:
        count = round(len(self._held) * share)
        chosen = random.Random(seed).sample(self._held, count)
        latencies: list[float] = []

        async def one(session: LightSession, due: float) -> None:
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    latencies.append(await session.step(due))
            except (OSError, TimeoutError) as exc:
                self._failures.append(repr(exc))

        apart = seconds / max(1, count)
        await asyncio.gather(*(one(each, at + n * apart) for n, each in enumerate(chosen)))
        return {"latencies": latencies, **self._failed()}

    def _failed(self) -> Json:
        failures, self._failures = self._failures, []
        return {"failed": len(failures), "why": failures[0] if failures else ""}


class Clients:
    """Several client processes, each with its part of the sessions."""

    def __init__(self, processes: int) -> None:
        self._members = [ClientProcess("shared.light_clients") for _ in range(processes)]
        self.opened = 0
        self.failed = 0
        self.seconds = 0.0

    def open(self, sessions: int, window: int, sources: Sequence[str], **address: Any) -> None:
        """Open this number of sessions at an address, given as `host`, `port` and `path`."""
        began = time.monotonic()
        many = len(self._members)
        for number, member in enumerate(self._members):
            count = sessions // many + (number < sessions % many)
            own_window = max(1, window // many)
            asked = {"count": count, "window": own_window, "sources": sources, **address}
            member.tell({"open": asked})
        answers = self._heard()
        self.seconds = time.monotonic() - began
        self.opened = sum(answer["opened"] for answer in answers)

    def step(self, share: float, seconds: float) -> list[float]:
        """Let a random share of the sessions step once, and return the latencies in seconds."""
        at = time.monotonic() + SOON_SECONDS
        for number, member in enumerate(self._members):
            member.tell({"step": {"share": share, "seconds": seconds, "at": at, "seed": number}})
        return [value for answer in self._heard() for value in answer["latencies"]]

    def end(self) -> None:
        for member in self._members:
            member.end()

    def _heard(self) -> list[Json]:
        answers = [member.hear() for member in self._members]
        self.failed += sum(answer["failed"] for answer in answers)
        for why in {answer["why"] for answer in answers if answer["failed"]}:
            print(f"failed: {why}", flush=True)
        return answers


async def _serve() -> None:
    """Handle one command after another until stdin ends."""
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    served = Served()
    while line := await lines.readline():
        [(name, asked)] = json.loads(line).items()
        print(json.dumps(await getattr(served, name)(**asked)), flush=True)


if __name__ == "__main__":
    raise_fd_limit()
    uvloop.run(_serve())
    sys.stdout.flush()
    os._exit(0)  # closing thousands of sockets one by one takes time
