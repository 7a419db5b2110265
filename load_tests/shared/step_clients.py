# SPDX-License-Identifier: Apache-2.0
"""Clients that step as fast as they are answered, in one light process.

    python -m load_tests.shared.step_clients PORT SESSIONS SECONDS PAYLOAD_BYTES
                                             [--hold] [--echo] [--path P]

Each session connects, resets, and then has one step in flight at a time, until SECONDS have passed;
then it closes. With `--hold`, the program prints `ready` when all sessions are open, and they begin
to step at a line on standard input. With `--echo` the action is that of upstream's template, whose
answer contains it twice; otherwise it is the benchmark's. To keep the clients cheap, their frames
are prepared once, with a mask of zeros, and answers are counted but not decoded, except the first
frame of each session. The program prints one line of JSON.
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

from openenvd.system.net.websocket import (
    CLOSE,
    FIN,
    NORMAL_CLOSE,
    TEXT,
    close_payload,
    parse_head,
    unmasked_client_frame,
    upgrade_request,
)

CONNECTING_AT_ONCE = 64
ANSWER_SECONDS = 60.0
WHOLE_TEXT = FIN | TEXT


@dataclass
class Plan:
    """The frames and the time limit of all sessions."""

    reset: bytes
    step: bytes
    ends_at: float = 0.0
    is_holding: bool = False
    path: str = "/ws"
    holding: list[StepClient] = field(default_factory=list)


@dataclass
class Tally:
    """The measurements of all sessions."""

    latencies: array[float] = field(default_factory=lambda: array("d"))
    sessions: int = 0
    first_step_at: float = 0.0
    last_answer_at: float = 0.0
    failed: int = 0
    first_failure: str = ""

    def fail(self, why: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or why


class StepClient(asyncio.Protocol):
    """One session."""

    def __init__(self, plan: Plan, tally: Tally, done: asyncio.Future[None]) -> None:
        self._plan = plan
        self._tally = tally
        self._done = done
        self._transport: Any = None
        self._head: bytes | None = b""  # of the handshake; None once it is over
        self._buffer = b""  # the beginning of a frame's header
        self._missing = 0  # bytes of the frame that is arriving
        self._kind = 0
        self._steps = -1  # the answer to the reset makes it 0
        self._sent_at = 0.0
        self._close_reason = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(upgrade_request("127.0.0.1", self._plan.path))

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            data = self._handshake(self._head + data)
        while data:
            data = self._skip(data) if self._missing else self._begin(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session, whatever the reason."""
        if not self._done.done():
            self._tally.fail(self._close_reason or f"connection lost: {exc!r}")
            self._done.set_result(None)

    def _handshake(self, head: bytes) -> bytes:
        end = head.find(b"\r\n\r\n")
        if end < 0:
            self._head = head
            return b""
        self._head = None
        if not head.startswith(b"HTTP/1.1 101"):
            self._give_up(head[:80].decode("latin-1"))
            return b""
        self._send(self._plan.reset)
        return head[end + 4 :]

    def _begin(self, data: bytes) -> bytes:
        data = self._buffer + data
        if (head := parse_head(data)) is None:
            self._buffer = data
            return b""
        self._buffer = b""
        self._kind, _, payload_at, end = head
        self._missing = end - payload_at
        if self._steps < 0 or self._kind != WHOLE_TEXT:
            self._look_at(data[payload_at:])
        if not self._missing:
            self._arrived()
        return data[payload_at:]

    def _skip(self, data: bytes) -> bytes:
        taken = min(len(data), self._missing)
        self._missing -= taken
        if not self._missing:
            self._arrived()
        return data[taken:]

    def _look_at(self, data: bytes) -> None:
        if self._kind == WHOLE_TEXT and b'"error"' in data[:40]:
            self._give_up(data[:200].decode())
        elif self._kind == FIN | CLOSE:
            code, text = int.from_bytes(data[:2], "big"), data[2:].decode(errors="replace")
            self._close_reason = f"closed with {code}: {text}"

    def _arrived(self) -> None:
        if self._kind != WHOLE_TEXT or self._done.done():
            return
        now = time.perf_counter()
        if self._steps >= 0:
            self._tally.latencies.append(now - self._sent_at)
            self._tally.last_answer_at = now
        else:
            self._tally.sessions += 1
            self._tally.first_step_at = self._tally.first_step_at or now
        self._steps += 1
        if self._plan.is_holding:
            self._plan.holding.append(self)
        else:
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """Send the next step, or close when the time is over."""
        if now < self._plan.ends_at:
            self._send(self._plan.step)
        else:
            self._leave()

    def _send(self, frame: bytes) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(frame)

    def _leave(self) -> None:
        self._transport.write(unmasked_client_frame(close_payload(NORMAL_CLOSE), CLOSE))
        self._done.set_result(None)

    def _give_up(self, why: str) -> None:
        if not self._done.done():
            self._tally.fail(why)
            self._done.set_result(None)
        self._transport.close()


def plan_of(payload_bytes: int, *, is_echo: bool = False) -> Plan:
    """Prepare the frames: a step has as many bytes as its answer."""
    text = "x" * payload_bytes
    action: dict[str, Any] = {"message": text}
    if not is_echo:
        action = {"wait_seconds": 0.0, "payload": text, "answer_bytes": payload_bytes}
    step = json.dumps({"type": "step", "data": action}).encode()
    reset = b'{"type":"reset","data":{}}'
    return Plan(unmasked_client_frame(reset), unmasked_client_frame(step))


async def let_go(plan: Plan, tally: Tally, sessions: int, seconds: float) -> None:
    while len(plan.holding) + tally.failed < sessions:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    now = tally.first_step_at = time.perf_counter()
    plan.ends_at = now + seconds
    plan.is_holding = False
    for client in plan.holding:
        client.go_on(now)


async def run(port: int, sessions: int, seconds: float, plan: Plan) -> dict[str, Any]:
    """Run all sessions, from the first connection to the last answer."""
    loop = asyncio.get_running_loop()
    tally, turns = Tally(), asyncio.Semaphore(CONNECTING_AT_ONCE)
    plan.ends_at = time.perf_counter() + seconds
    started, cpu = time.perf_counter(), time.process_time()

    async def one() -> None:
        done: asyncio.Future[None] = loop.create_future()
        try:
            async with turns:
                client = StepClient(plan, tally, done)
                transport, _ = await loop.create_connection(lambda: client, "127.0.0.1", port)
            async with asyncio.timeout(seconds + ANSWER_SECONDS):
                await done
            transport.close()
        except (OSError, TimeoutError) as exc:
            tally.fail(repr(exc))

    holding = let_go(plan, tally, sessions, seconds) if plan.is_holding else asyncio.sleep(0)
    await asyncio.gather(holding, *(one() for _ in range(sessions)))
    return {
        "sessions": tally.sessions,
        "failed": tally.failed,
        "first_failure": tally.first_failure,
        "seconds": time.perf_counter() - started,
        "stepping_seconds": tally.last_answer_at - tally.first_step_at,
        "cpu_seconds": time.process_time() - cpu,
        "latencies": [round(value, 6) for value in tally.latencies],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("sessions", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("payload_bytes", type=int)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--echo", action="store_true")
    parser.add_argument("--path", default="/ws")
    given = parser.parse_args()
    plan = plan_of(given.payload_bytes, is_echo=given.echo)
    plan.is_holding, plan.path = given.hold, given.path
    outcome = uvloop.run(run(given.port, given.sessions, given.seconds, plan))
    json.dump(outcome, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
