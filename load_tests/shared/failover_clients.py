# SPDX-License-Identifier: Apache-2.0
"""Sessions that step at a pace, tell how each was lost, and come back: one light process.

    python -m load_tests.shared.failover_clients BASE_URL SESSIONS PACE_SECONDS FILE

Each session connects, resets, and does a step every PACE_SECONDS. One that is lost connects again
until it has a session. `ready` on standard output says that all have stepped; a line on standard
input ends them. Then this is in the file:

    {"lost": [{"at", "replica", "told", "back_after_seconds"}], "steps", "step_errors"}

`at` is the monotonic clock, `replica` what the handshake said, `told` what the client was told
before its connection ended: the code of an error or of a close, or nothing (`reset`, `eof`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from openenvd.env_host.protocol import REPLICA_HEADER
from openenvd.system.websocket import (
    CLOSE,
    FIN,
    TEXT,
    parse_head,
    unmasked_client_frame,
    upgrade_request,
)

CONNECTING_AT_ONCE = 64
AGAIN_SECONDS = 0.05  # between two attempts of a session to come back
HANDSHAKE_SECONDS = 10.0
RESET = unmasked_client_frame(b'{"type":"reset","data":{}}')
STEP = unmasked_client_frame(b'{"type":"step","data":{"payload":"x","answer_bytes":16}}')


@dataclass
class Tally:
    """What all sessions have seen."""

    steps: int = 0
    step_errors: int = 0
    lost: list[dict[str, Any]] = field(default_factory=list)
    is_ending: bool = False


class Session(asyncio.Protocol):
    """One connection."""

    def __init__(self, authority: str, path: str, pace_seconds: float, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[bool] = loop.create_future()  # whether there is a session
        self.ended: asyncio.Future[None] = loop.create_future()
        self.replica = ""
        self.told = ""
        self._authority = authority
        self._path = path
        self._pace_seconds = pace_seconds
        self._tally = tally
        self._transport: Any = None
        self._has_upgraded = False
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        """Ask for the upgrade."""
        self._transport = transport
        transport.write(upgrade_request(self._authority, self._path))

    def data_received(self, data: bytes) -> None:
        """The handshake's answer, then frames."""
        self._buffer += data
        if not self._has_upgraded and not self._read_handshake():
            return
        while (head := parse_head(self._buffer)) is not None and head[3] <= len(self._buffer):
            kind, _, begin, end = head
            payload, self._buffer = self._buffer[begin:end], self._buffer[end:]
            self._on_frame(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever the reason: this session is over."""
        self.told = self.told or ("reset" if exc else "eof")
        if not self.began.done():
            self.began.set_result(False)
        self.ended.set_result(None)

    def step(self) -> None:
        """Do a step."""
        if not self.ended.done():
            self._transport.write(STEP)

    def close(self) -> None:
        """Leave."""
        self._transport.close()

    def _read_handshake(self) -> bool:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return False
        lines = head.decode("latin-1").split("\r\n")
        if not lines[0].startswith("HTTP/1.1 101"):
            self.told = lines[0]
            self._transport.close()
            return False
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        self.replica = headers.get(REPLICA_HEADER.lower(), "")
        self._has_upgraded, self._buffer = True, rest
        self._transport.write(RESET)
        return True

    def _on_frame(self, kind: int, payload: bytes) -> None:
        if kind == FIN | CLOSE:
            self.told = self.told or f"close {int.from_bytes(payload[:2], 'big')}"
        elif kind == FIN | TEXT and b'"error"' in payload[:40]:
            self.told = json.loads(payload)["data"]["code"]
            self._tally.step_errors += 1
        elif kind == FIN | TEXT:
            self._on_answer()

    def _on_answer(self) -> None:
        if self.began.done():
            self._tally.steps += 1
        else:
            self.began.set_result(True)
        asyncio.get_running_loop().call_later(self._pace_seconds, self.step)


@dataclass
class Clients:
    """All sessions."""

    base_url: str
    pace_seconds: float
    tally: Tally = field(default_factory=Tally)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTING_AT_ONCE))

    async def connect(self) -> Session | None:
        """Try once; None when there is no session."""
        parts = urlsplit(self.base_url)
        path = f"{parts.path.rstrip('/')}/ws" + (f"?{parts.query}" if parts.query else "")
        authority = f"{parts.hostname}:{parts.port}"
        loop = asyncio.get_running_loop()
        try:
            async with self.turns, asyncio.timeout(HANDSHAKE_SECONDS):
                _, session = await loop.create_connection(
                    lambda: Session(authority, path, self.pace_seconds, self.tally),
                    parts.hostname or "127.0.0.1",
                    parts.port or 80,
                )
                return session if await session.began else None
        except (OSError, TimeoutError):
            return None

    async def one(self, begun: asyncio.Event) -> None:
        """One client: a session, and another when it is lost."""
        lost: dict[str, Any] | None = None
        while not self.tally.is_ending:
            session = await self.connect()
            if session is None:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if lost is not None:
                lost["back_after_seconds"] = time.monotonic() - lost["at"]
            begun.set()
            await session.ended
            lost = {"at": time.monotonic(), "replica": session.replica, "told": session.told}
            self.tally.lost.append(lost)


async def run(base_url: str, sessions: int, pace_seconds: float) -> dict[str, Any]:
    """Play until a line comes."""
    clients = Clients(base_url, pace_seconds)
    begun = [asyncio.Event() for _ in range(sessions)]
    tasks = [asyncio.create_task(clients.one(each)) for each in begun]
    for each in begun:
        await each.wait()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    clients.tally.is_ending = True
    lost = list(clients.tally.lost)  # before they leave
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"lost": lost, "steps": clients.tally.steps, "step_errors": clients.tally.step_errors}


if __name__ == "__main__":
    found = uvloop.run(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    Path(sys.argv[4]).write_text(json.dumps(found))
