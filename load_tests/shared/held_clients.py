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
from typing import Any

import uvloop

from load_tests.shared.light_session import LightSession, open_session
from openenvd.system.process.proc import raise_fd_limit

Json = dict[str, Any]

OPEN_SECONDS = 30.0  # of one session, from its connection to its reset
STEP_SECONDS = 60.0


class Clients:
    """All sessions of this process."""

    def __init__(self) -> None:
        self._held: list[LightSession] = []
        self._failures: list[str] = []

    async def open(self, asked: Json) -> Json:
        """Open them, not more than `window` at once."""
        sources = itertools.cycle(asked["sources"] or [""])
        turns = asyncio.Semaphore(asked["window"])
        address = (asked["host"], asked["port"], asked["path"])

        async def one() -> None:
            async with turns:
                try:
                    async with asyncio.timeout(OPEN_SECONDS):
                        self._held.append(await open_session(*address, next(sources)))
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

        async def one(session: LightSession, due: float) -> None:
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
