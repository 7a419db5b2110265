# SPDX-License-Identifier: Apache-2.0
"""A state for tests of shared worlds."""

import asyncio
import time
from typing import Any


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
