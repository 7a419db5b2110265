# SPDX-License-Identifier: Apache-2.0
"""Asks `rollouts.replay`, in a process of its own, what is in the folder of a rollout."""

from __future__ import annotations

import asyncio
import sys

import orjson

from ...system.text.json_lines import Json
from ..errors import NotFound, Unreadable

PROGRAM = "openenvd.rollouts.replay"
MAX_SECONDS = 30.0
MAX_READERS = 2  # at once
_ERROR = b'{"error":'  # what an answer begins with that is none


class ReplayReader:
    """Reads the folders of rollouts, a few at once."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(MAX_READERS)

    async def ask(self, question: Json) -> bytes:
        """The answer to a question (see `rollouts.replay`): JSON, which may be large.

        Raises:
            NotFound: The folder has none of it, or nothing that can be read.
            Unreadable: The process was ended, or took too long.
        """
        async with self._turn:
            answer = await self._run(orjson.dumps(question).decode())
        if answer.startswith(_ERROR):
            error = orjson.loads(answer)["error"]
            raise NotFound(error["message"], error["hint"])
        return answer

    async def _run(self, question: str) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", PROGRAM, question),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(MAX_SECONDS):
                told, problem = await process.communicate()
        except TimeoutError:
            raise Unreadable(f"reading the rollout took longer than {MAX_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = problem.decode(errors="replace").strip().rpartition("\n")[2]
            raise Unreadable(f"reading the rollout failed: {last or process.returncode}")
        return told
