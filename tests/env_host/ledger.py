# SPDX-License-Identifier: Apache-2.0
"""A state for tests of shared worlds, and a shard of it that is a process of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Ledger:
    """Says back, holds, counts and fails on demand."""

    def __init__(self) -> None:
        self._entries: list[Any] = []
        self._ended: list[int] = []
        self._held = 0
        self._most_held = 0
        self._gate = asyncio.Event()
        self._hidden = "not to be had"

    def echo(self, body: bytes | None = None, **fields: Any) -> Any:
        if body is None:
            return fields
        return (fields, body) if fields else body

    def nothing(self) -> None:
        return None

    def note(self, entry: Any) -> int:
        self._entries.append(entry)
        return len(self._entries)

    def entries(self) -> list[Any]:
        return self._entries

    def who(self, session: int) -> int:
        return session

    def length(self, body: bytes) -> int:
        return len(body)

    def zeros(self, count: int) -> bytes:
        return bytes(count)

    def fail(self) -> None:
        raise LookupError("there is nothing")

    def fail_in_latin(self) -> None:
        raise OSError("caf\udce9")  # as of a file name that is not UTF-8

    def fail_to_say(self) -> object:
        return object()

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    async def hold(self, body: bytes | None = None, token: Any = None) -> Any:
        """Answer only once `release` was called."""
        self._held += 1
        self._most_held = max(self._most_held, self._held)
        await self._gate.wait()
        self._held -= 1
        return token

    async def held(self, at_least: int) -> int:
        while self._held < at_least:
            await asyncio.sleep(0)
        return self._held

    def most_held(self) -> int:
        return self._most_held

    def release(self) -> None:
        gate, self._gate = self._gate, asyncio.Event()
        gate.set()

    async def after(self, turns: int, token: Any) -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        return token

    async def ended(self, at_least: int) -> list[int]:
        while len(self._ended) < at_least:
            await asyncio.sleep(0.001)
        return self._ended

    def session_ended(self, session: int) -> None:
        self._ended.append(session)

    def close(self) -> None:
        return None

    def _private(self) -> str:
        return self._hidden


class LedgerWorld:
    """What an environment class says of its state."""

    SHARED_STATE = True
    create_state = staticmethod(Ledger)


_SHARD = """
import asyncio, json, sys
from openenvd.env_host.shared_state.connection import StateLink
from openenvd.env_host.shared_state.connection import StateProxy

def say(**facts):
    print(json.dumps(facts), flush=True)

async def main(address):
    link = StateLink(address, lambda lost: say(lost=str(lost)))
    world = StateProxy(link)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        calls = [world.call(order["method"], **one) for one in order["calls"]]
        say(sent=len(calls))
        found = await asyncio.gather(*calls, return_exceptions=True)
        say(found=[repr(x) if isinstance(x, Exception) else x for x in found])

asyncio.run(main(*sys.argv[1:]))
"""


class ShardProcess:
    """A shard in a process of its own that makes calls on command."""

    def __init__(self, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SHARD, address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, method: str, *calls: dict[str, Any]) -> None:
        """Have it make these calls, all at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"method": method, "calls": calls}) + "\n")
        self.process.stdin.flush()

    def said(self, what: str) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if what in (facts := json.loads(line)):
                return facts[what]
        raise AssertionError(f"it never said {what}")

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
