# SPDX-License-Identifier: Apache-2.0
"""One session over OpenEnv's WebSocket protocol: reset, step, state, close.

The methods and results are those of OpenEnv's `GenericEnvClient`. That client mistakes the late
answer to an abandoned call for the answer to the next call; this one does not.

    {"type": "reset", "data": {…}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": action}   the same
    {"type": "state"}                  {"type": "state", "data": {…}}
    any of them                        {"type": "error", "data": {message, code}}: `SessionError`

A session is opened by `with`. Like OpenEnv's client, it uses no proxy. After the end of a session,
every further call raises the reason, with the same message, code and hint. One call is under way at
a time, and others wait; a call that is cancelled or times out ends the session.

`AsyncSession` is built on `rollouts.session`; `Session` runs an `AsyncSession` on a thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from ..env_host.errors import WSErrorCode
from ..rollouts.session import session as sessions
from ..rollouts.session.loop_thread import LoopThread, loop_thread
from ..rollouts.session.session import CONNECT_SECONDS, SessionEnd, SessionFailed, error_text
from ..system.text.json_lines import Json
from .errors import SessionError

ANSWER_SECONDS = 60.0  # as long as OpenEnv's client waits
SHOWN_BYTES = 200  # of an answer that is no message
PING_SECONDS = 20.0  # keeps idle sessions open behind a proxy

# Errors after which the server closes the session.
_ENDS = frozenset(
    {WSErrorCode.CAPACITY_REACHED, WSErrorCode.FACTORY_ERROR, WSErrorCode.SESSION_ERROR}
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a reset or a step.

    Attributes:
        observation: What the agent sees, as JSON.
        reward: The reward of the step; None if the environment gives none.
        done: Whether the episode has ended.
    """

    observation: Json
    reward: float | None = None
    done: bool = False


@dataclass(eq=False, repr=False)
class _Connecting:
    """The arguments of a session."""

    base_url: str
    connect_timeout: float = CONNECT_SECONDS
    answer_timeout: float = ANSWER_SECONDS
    name: str | None = None

    def __post_init__(self) -> None:
        seconds: object = self.answer_timeout
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"timeout: {seconds!r} is no number of seconds above 0")

    @property
    def _lost_hint(self) -> str | None:
        """The hint of an error if the session is lost."""
        return None if self.name is None else f"openenv status {self.name} tells what happened"

    def _raised(self, message: str, code: str | None, data: Json) -> SessionError:
        """Return the error for an exception of the environment, with its class and its place."""
        place, hint = data.get("place"), data.get("hint")
        if exception := data.get("exception"):
            message = f"{exception}: {message}" + (f" ({place})" if place else "")
            if hint is None and self.name is not None:
                hint = f"openenv logs {self.name} shows the traceback"
        return SessionError(message, code, hint)


class AsyncSession(_Connecting):
    """A session for asyncio, open inside of `async with`.

    Args:
        base_url: The environment's address, with its token if it wants one.
        connect_timeout: Seconds to wait until it is open.
        answer_timeout: Seconds to wait for each answer.
        name: The environment's name, for the hints of errors.
    """

    _session: sessions.Session | None = None
    _end: SessionError | None = None  # why the session has ended

    async def __aenter__(self) -> Self:
        try:
            self._session = await sessions.Session.open(
                self.base_url, connect_seconds=self.connect_timeout, ping_seconds=PING_SECONDS
            )
        except (SessionFailed, ValueError) as exc:
            raise SessionError(f"no session could be opened: {exc}", hint=self._lost_hint) from exc
        self._end = None
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode, with a `seed` and the environment's own arguments."""
        return _result(await self._ask("reset", kwargs))

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return _result(await self._ask("step", action))

    async def state(self) -> Json:
        """Return the environment's state."""
        return await self._ask("state", None)

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Json:
        if self._session is None:
            raise SessionError("the session is not open: with env.connect() as session: …")
        if self._end is not None:
            raise _again(self._end)
        message = json.dumps({"type": kind} if data is None else {"type": kind, "data": data})
        try:
            text = await self._session.ask(message, self.answer_timeout, kind)
        except SessionFailed as exc:
            if exc.reason is not SessionEnd.CONNECTION_LOST:
                is_late = exc.reason is SessionEnd.STEP_TIMED_OUT
                raise SessionError(str(exc), hint=self._lost_hint if is_late else None) from exc
            said = "the connection was lost" if exc.close is None else "closed by the server"
            message = f"the session has ended: {(exc.close and exc.close.reason) or said}"
            raise SessionError(message, hint=self._lost_hint) from exc
        try:
            answer = json.loads(text)
            found: Json = answer.get("data") or {}
        except (ValueError, AttributeError):
            shown = text[:SHOWN_BYTES].decode(errors="replace")
            raise SessionError(f"the answer is no message of OpenEnv's protocol: {shown}") from None
        if answer.get("type") != "error":
            return found
        message, code = error_text(found.get("message"), found.get("errors")), found.get("code")
        if code not in _ENDS:
            raise self._raised(message, code, found)
        # The close frame that follows has this message, but may be truncated.
        hint = self._lost_hint if code == WSErrorCode.SESSION_ERROR else None
        self._end = SessionError(message, code, hint)
        raise _again(self._end)


class Session(_Connecting):
    """A session for synchronous code, open inside of `with`; the arguments of `AsyncSession`."""

    _thread: LoopThread | None = None  # of an open session

    @cached_property
    def _session(self) -> AsyncSession:
        options = self.connect_timeout, self.answer_timeout, self.name
        return AsyncSession(self.base_url, *options)

    def __enter__(self) -> Self:
        thread = loop_thread()
        thread.call(self._session.__aenter__())
        self._thread = thread
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode, with a `seed` and the environment's own arguments."""
        return self._thread_here().call(self._session.reset(**kwargs))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return self._thread_here().call(self._session.step(action))

    def state(self) -> Json:
        """Return the environment's state."""
        return self._thread_here().call(self._session.state())

    def close(self) -> None:
        """End the session; when Python ends, its socket is closed with the process."""
        is_here = self._thread is not None and self._thread.pid == os.getpid()
        if self._thread is not None and is_here and not sys.is_finalizing():
            self._thread.call(self._session.close())

    def _thread_here(self) -> LoopThread:
        """Return the session's thread; without a session any thread, on which the call fails."""
        thread = self._thread or loop_thread()
        if thread.pid != os.getpid():
            message = f"the session was opened by process {thread.pid}; open one in this process"
            raise SessionError(message)
        return thread


def _result(data: Json) -> StepResult:
    return StepResult(data.get("observation") or {}, data.get("reward"), bool(data.get("done")))


def _again(error: SessionError) -> SessionError:
    """Return a copy of the error, because each call raises its own."""
    return SessionError(error.message, error.code, error.hint)
