# SPDX-License-Identifier: Apache-2.0
"""Sessions that step at a pace, tell how each was lost, and come back: one light process.

    python -m load_tests.shared.failover_clients BASE_URL SESSIONS PACE_SECONDS FILE

Each session connects, resets, and does a step every PACE_SECONDS. One that is lost connects again
until it has a session. `ready` on standard output says that all have stepped; a line on standard
input ends them. Then this is in the file:

    {"lost": [{"at", "replica", "told", "back_after_seconds"}], "steps"}

`at` is the monotonic clock, `replica` what the handshake said, `told` what the client was told
before its connection ended: the code of an error or of a close, or nothing (`reset`, `eof`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from load_tests.shared.light_session import LightSession, open_session

CONNECTING_AT_ONCE = 64
AGAIN_SECONDS = 0.05  # between two attempts of a session to come back
HANDSHAKE_SECONDS = 10.0


@dataclass
class Tally:
    """What all sessions have seen."""

    steps: int = 0
    lost: list[dict[str, Any]] = field(default_factory=list)
    is_ending: bool = False


@dataclass
class Clients:
    """All sessions."""

    base_url: str
    pace_seconds: float
    tally: Tally = field(default_factory=Tally)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONNECTING_AT_ONCE))

    async def connect(self) -> LightSession | None:
        """Try once; None when there is no session."""
        parts = urlsplit(self.base_url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            async with self.turns, asyncio.timeout(HANDSHAKE_SECONDS):
                return await open_session(parts.hostname or "127.0.0.1", parts.port or 80, path)
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
            await self.steps(session)
            lost = {"at": time.monotonic(), "replica": session.replica, "told": session.told}
            self.tally.lost.append(lost)

    async def steps(self, session: LightSession) -> None:
        """Step at the pace until the connection is lost, which is noticed at once."""
        while not (await asyncio.wait([session.ended], timeout=self.pace_seconds))[0]:
            with suppress(ConnectionError):
                await session.step(time.monotonic())
                self.tally.steps += 1


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
    return {"lost": lost, "steps": clients.tally.steps}


if __name__ == "__main__":
    found = uvloop.run(run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    Path(sys.argv[4]).write_text(json.dumps(found))
