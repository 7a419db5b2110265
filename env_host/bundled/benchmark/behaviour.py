# SPDX-License-Identifier: Apache-2.0
"""The behaviour of the benchmark environment, for both of its servers; imports only pydantic.

The same fields and methods are mixed into our base classes (`environment.py`) and into upstream's
(`load_tests/peers`), so that both servers do the same work. Asynchronous unless `BENCHMARK_SYNC=1`
is in the server's environment: then a step blocks its thread, as most environments do.

After the benchmark environment of https://github.com/burtenshaw/openenv-scaling.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

SYNC_VARIABLE = "BENCHMARK_SYNC"
MAX_WAIT_SECONDS = 3600.0
MAX_ANSWER_BYTES = 64 * 2**20


def is_synchronous() -> bool:
    """Return whether `BENCHMARK_SYNC` asks for the variant that blocks a thread."""
    return os.environ.get(SYNC_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


@functools.cache
def host_url() -> str:
    """Return this machine's name and `PORT`, which are read once in each serving process."""
    return f"{socket.gethostname()}:{os.environ.get('PORT', '8000')}"


class WaitFields(BaseModel):
    """The fields of an action."""

    # The actions of `openenv test`: random ones would wait for half an hour.
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{}, {"wait_seconds": 0.002}, {"payload": "x" * 64}, {"answer_bytes": 1024}]
        }
    )

    wait_seconds: float = Field(
        default=0.0, ge=0, le=MAX_WAIT_SECONDS, description="How long the step takes"
    )
    payload: str = Field(default="", description="Any text; makes the request larger")
    answer_bytes: int = Field(
        default=0, ge=0, le=MAX_ANSWER_BYTES, description="Length of the answer's `payload`"
    )


class SeenFields(BaseModel):
    """The fields of an observation: the process that served it, and how long it took."""

    waited_seconds: float = Field(default=0.0, description="How long the step waited")
    pid: int = Field(default=0, description="The process that serves the session")
    session_hash: str = Field(default="", description="Id of the session's environment instance")
    host_url: str = Field(default="", description="The machine that serves it")
    step_count: int = Field(default=0, description="Steps since the reset")
    timestamp: float = Field(default=0.0, description="Unix time of the answer, at the server")
    payload_bytes: int = Field(default=0, description="Length of the action's `payload`")
    payload: str = Field(default="", description="Text of `answer_bytes` characters")


class Waits:
    """The environment, without its base class: blocks the session's thread while it waits."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    observation_cls: Any = SeenFields
    state_cls: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._session_hash = uuid4().hex[:12]
        self._episode_id = str(uuid4())
        self._step_count = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        """Begin an episode; `seed` changes nothing here."""
        self._episode_id = episode_id or str(uuid4())
        self._step_count = 0
        return self._seen(0.0)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Wait for `action.wait_seconds`."""
        started = time.monotonic()
        if action.wait_seconds > 0:
            time.sleep(action.wait_seconds)
        return self._after_step(action, started)

    @property
    def state(self) -> Any:
        """The episode's id and its steps."""
        return self.state_cls(episode_id=self._episode_id, step_count=self._step_count)

    def _after_step(self, action: WaitFields, started: float) -> Any:
        self._step_count += 1
        waited_seconds = time.monotonic() - started
        if not (action.payload or action.answer_bytes):
            return self._seen(waited_seconds)
        answer = "x" * action.answer_bytes
        return self._seen(waited_seconds, payload_bytes=len(action.payload), payload=answer)

    def _seen(self, waited_seconds: float, **more: Any) -> Any:
        return self.observation_cls(
            waited_seconds=waited_seconds,
            pid=os.getpid(),
            session_hash=self._session_hash,
            host_url=host_url(),
            step_count=self._step_count,
            timestamp=time.time(),
            **more,
        )


class WaitsOnLoop(Waits):
    """The same on the event loop: other sessions continue while it waits."""

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> Any:
        """Begin an episode."""
        return self.reset(seed, episode_id)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Wait for `action.wait_seconds`."""
        started = time.monotonic()
        if action.wait_seconds > 0:
            await asyncio.sleep(action.wait_seconds)
        return self._after_step(action, started)
