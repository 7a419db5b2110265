# SPDX-License-Identifier: Apache-2.0
"""Environments that are played on pages of the dashboard: a process of `rollouts.play` for each.

A process ends when its page is closed, after 15 minutes without a call, and with the daemon, since
its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass, field

import orjson

from ...system.text.json_lines import Json
from ..errors import NotFound, QueueFull

PROGRAM = "openenvd.rollouts.play"
MAX_PLAYERS = 8
ENDED = "this play has ended: nothing was done for 15 minutes", "a reset begins another"


@dataclass
class _Player:
    process: Process
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time

    async def ask(self, call: Json) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self.turn:
            try:
                self.process.stdin.write(orjson.dumps(call) + b"\n")
                size = int(await self.process.stdout.readline())
                return await self.process.stdout.readexactly(size)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                raise NotFound(*ENDED) from None


class Players:
    """The processes of all pages that play, by an id that the page has chosen."""

    def __init__(self) -> None:
        self._players: dict[str, _Player] = {}

    async def ask(self, player_id: str, call: Json) -> bytes:
        """Return the answer to a call as JSON; `begin` starts the process.

        Raises:
            NotFound: The process has ended.
            QueueFull: Too many pages play.
        """
        if call["call"] == "begin":
            self.end(player_id)
            self._players[player_id] = await self._start()
        if (player := self._players.get(player_id)) is None:
            raise NotFound(*ENDED)
        return await player.ask(call)

    async def _start(self) -> _Player:
        running = {i: p for i, p in self._players.items() if p.process.returncode is None}
        self._players = running
        if len(running) >= MAX_PLAYERS:
            raise QueueFull(f"{MAX_PLAYERS} pages play already", "close one of them")
        program = [sys.executable, "-P", "-m", PROGRAM]
        made = asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        return _Player(await made)

    def end(self, player_id: str) -> None:
        """End a process, and so its session."""
        if (player := self._players.pop(player_id, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                player.process.kill()
