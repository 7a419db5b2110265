# SPDX-License-Identifier: Apache-2.0
"""The dependencies of the HTTP handlers: one value on the application's state.

`ReplayReader` asks `rollouts.replay`, in its own process, what is in the folder of a rollout.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import orjson
from fastapi import Depends, Request

from ...system.text.json_lines import Json
from ..errors import NotFound, Unreadable

if TYPE_CHECKING:
    from ...executor.executor import BurstableExecutor
    from ...requests_db.async_store import AsyncStore
    from ...schema.settings import Paths, Settings
    from ...system.process.loop_lag import EventLoopLagMonitor
    from ..dispatch.dispatcher import Dispatcher
    from ..dispatch.submission import Submitter
    from ..events import EventBus
    from ..reconcile.reconciler import Reconciler

PROGRAM = "openenvd.rollouts.replay"
MAX_SECONDS = 30.0
MAX_READERS = 2  # at once
_ERROR = b'{"error":'  # the beginning of an answer that is an error


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
        program = [sys.executable, "-P", "-m", PROGRAM, orjson.dumps(question).decode()]
        async with self._turn:
            try:
                with anyio.fail_after(MAX_SECONDS):
                    done = await anyio.run_process(program, stdin=subprocess.DEVNULL, check=False)
            except TimeoutError:
                text = f"reading the rollout took longer than {MAX_SECONDS:.0f} s"
                raise Unreadable(text) from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise Unreadable(f"reading the rollout failed: {last or done.returncode}")
        if done.stdout.startswith(_ERROR):
            error = orjson.loads(done.stdout)["error"]
            raise NotFound(error["message"], error["hint"])
        return done.stdout


@dataclass(frozen=True)
class Dependencies:
    """The dependencies of the HTTP handlers."""

    paths: Paths
    settings: Settings
    identity: dict[str, Any]  # the contents of daemon.json
    limits: dict[str, Any]
    store: AsyncStore
    executor: BurstableExecutor
    reconciler: Reconciler
    dispatcher: Dispatcher
    submitter: Submitter
    bus: EventBus
    lag: EventLoopLagMonitor  # of the one event loop
    stopping: asyncio.Event  # set when the daemon is to end: streams end with it
    began_at: float = field(default_factory=time.monotonic)
    replay: ReplayReader = field(default_factory=ReplayReader)


# Asynchronous, though it awaits nothing: FastAPI runs any other dependency in a pool of threads,
# 40 of them, each of which then contends with the loop for every call.
async def _deps(request: Request) -> Dependencies:
    deps: Dependencies = request.app.state.deps
    return deps


Injected = Annotated[Dependencies, Depends(_deps)]
