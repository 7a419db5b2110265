# SPDX-License-Identifier: Apache-2.0
"""Clients that step as fast as they are answered, in one light process.

    python -m load_tests.shared.step_clients URL SESSIONS SECONDS PAYLOAD_BYTES [--echo]

Each session connects and resets. The program prints `"ready"` when all have, or have failed. At a
line on standard input they begin to step: each has one step in flight at a time, until SECONDS have
passed; then it closes. With `--echo` the action is that of upstream's template, whose answer
contains it twice; otherwise it is the benchmark's. To keep the clients cheap, their frames are
prepared once, with a mask of zeros, and answers are counted but not decoded: only their beginning
is searched for an error. The program prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import uvloop
from picows import WSError, WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

from openenvd.rollouts.bench.generator import CLOSE_FRAME, RESET
from openenvd.system.net.websocket import unmasked_client_frame

CONNECTING_AT_ONCE = 64
ANSWER_SECONDS = 60.0


@dataclass
class Tally:
    """The frame of all sessions, and their measurements."""

    step: bytes  # the frame
    ends_at: float = 0.0
    latencies: array[float] = field(default_factory=lambda: array("d"))
    last_answer_at: float = 0.0
    failed: int = 0
    first_failure: str = ""

    def fail(self, why: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or why


class StepClient(WSListener):
    """One session."""

    def __init__(self, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        self.is_reset: asyncio.Future[None] = loop.create_future()
        self.is_over: asyncio.Future[None] = loop.create_future()
        self._tally = tally
        self._close_reason = "connection lost"

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._write = transport.underlying_transport.write
        self._write(RESET)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        now = time.perf_counter()
        if frame.msg_type == WSMsgType.CLOSE:
            self._close_reason = f"closed with {frame.get_close_code()}"
        elif frame.msg_type != WSMsgType.TEXT:
            return
        elif b'"error"' in (beginning := bytes(frame.get_payload_as_memoryview()[:200]))[:40]:
            self._close_reason = beginning.decode(errors="replace")
            transport.disconnect()
        elif not self.is_reset.done():
            self.is_reset.set_result(None)
        else:
            self._tally.latencies.append(now - self._sent_at)
            self._tally.last_answer_at = now
            self.step(now)

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        """Fail the session, unless it has closed by itself."""
        for waiting in (self.is_reset, self.is_over):
            if not waiting.done():
                waiting.set_exception(ConnectionError(self._close_reason))
                waiting.exception()  # it may be that nothing waits for it

    def step(self, now: float) -> None:
        """Take the next step, or close when the time is over."""
        if now < self._tally.ends_at:
            self._sent_at = time.perf_counter()
            self._write(self._tally.step)
        else:
            self._write(CLOSE_FRAME)
            self.is_over.set_result(None)


def step_frame(payload_bytes: int, *, is_echo: bool) -> bytes:
    """Make the frame of a step, whose request and answer have the same size."""
    text = "x" * payload_bytes
    action: dict[str, Any] = {"message": text}
    if not is_echo:
        action = {"wait_seconds": 0.0, "payload": text, "answer_bytes": payload_bytes}
    return unmasked_client_frame(json.dumps({"type": "step", "data": action}).encode())


async def run(url: str, sessions: int, seconds: float, tally: Tally) -> dict[str, Any]:
    """Run all sessions, from the first connection to the last answer."""
    cpu, turns = time.process_time(), asyncio.Semaphore(CONNECTING_AT_ONCE)
    clients: list[StepClient] = []

    async def begin() -> None:
        async with turns:
            client = StepClient(tally)
            await ws_connect(lambda: client, url, websocket_handshake_timeout=ANSWER_SECONDS)
        clients.append(client)
        await asyncio.wait_for(client.is_reset, ANSWER_SECONDS)

    async def all_of(waits: list[Any]) -> None:
        for found in await asyncio.gather(*waits, return_exceptions=True):
            if isinstance(found, OSError | TimeoutError | WSError):
                tally.fail(repr(found))
            elif isinstance(found, BaseException):
                raise found

    await all_of([begin() for _ in range(sessions)])
    print(json.dumps("ready"), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    began = time.perf_counter()
    tally.ends_at = began + seconds
    stepping = [client for client in clients if not client.is_over.done()]
    for client in stepping:
        client.step(began)
    await all_of([asyncio.wait_for(c.is_over, seconds + ANSWER_SECONDS) for c in stepping])
    return {
        "failed": tally.failed,
        "first_failure": tally.first_failure,
        "stepping_seconds": tally.last_answer_at - began,
        "cpu_seconds": time.process_time() - cpu,
        "latencies": [round(value, 6) for value in tally.latencies],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("sessions", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("payload_bytes", type=int)
    parser.add_argument("--echo", action="store_true")
    given = parser.parse_args()
    tally = Tally(step_frame(given.payload_bytes, is_echo=given.echo))
    print(json.dumps(uvloop.run(run(given.url, given.sessions, given.seconds, tally))))


if __name__ == "__main__":
    main()
