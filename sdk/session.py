# SPDX-License-Identifier: Apache-2.0
"""One session over OpenEnv's WebSocket protocol: reset, step, state, close.

Where the package `openenv` is installed, sessions are those of its own `GenericEnvClient`. Where it
is not, they are these: the same methods and the same results, and nothing beyond them.

    {"type": "reset", "data": {…}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": action}   the same
    {"type": "state"}                  {"type": "state", "data": {…}}
    any of them                        {"type": "error", "data": {message, code}}: `SessionError`

A session is opened by `with`. Proxies are passed by, as OpenEnv's client does. A session that has
ended says why with every further call: in the same words, with the same code and hint.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import websockets.asyncio.client
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ..client.errors import SessionError
from ..env_host.errors import WSErrorCode
from ..env_host.protocol import MAX_MESSAGE_BYTES
from ..rollouts.errors import NoEnvironment
from ..rollouts.sessions.answers import error_text
from ..rollouts.sessions.session import session_url
from ..system.access_tokens import without_token

Json = dict[str, Any]

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 60.0  # as OpenEnv's client waits

# Errors after which the server closes the session.
_ENDS = frozenset(
    {WSErrorCode.CAPACITY_REACHED, WSErrorCode.FACTORY_ERROR, WSErrorCode.SESSION_ERROR}
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a reset or a step.

    Attributes:
        observation: What the agent sees, as JSON.
        reward: The reward of the step; None where the environment gives none.
        done: Whether the episode has ended.
    """

    observation: Json
    reward: float | None = None
    done: bool = False


class AnyResult(Protocol):
    """What `StepResult` and OpenEnv's own have in common."""

    @property
    def observation(self) -> Any:
        """What the agent sees."""

    @property
    def reward(self) -> Any:
        """The reward of the step, or None."""

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""


class AnySession(Protocol):
    """What `Session` and OpenEnv's synchronous client have in common."""

    def reset(self, **kwargs: Any) -> AnyResult:
        """Begin an episode."""

    def step(self, action: Any) -> AnyResult:
        """Take a step."""

    def state(self) -> Any:
        """Return the environment's state."""

    def close(self) -> None:
        """End the session."""


class AnyAsyncSession(Protocol):
    """What `AsyncSession` and OpenEnv's client have in common."""

    async def reset(self, **kwargs: Any) -> AnyResult:
        """Begin an episode."""

    async def step(self, action: Any) -> AnyResult:
        """Take a step."""

    async def state(self) -> Any:
        """Return the environment's state."""

    async def close(self) -> None:
        """End the session."""


class _Common:
    """What both kinds of sessions are made with, and how they fail."""

    _end: SessionError | None = None  # why the session has ended

    def __init__(
        self,
        base_url: str,
        connect_timeout: float = CONNECT_SECONDS,
        answer_timeout: float = ANSWER_SECONDS,
        lost_hint: str | None = None,
    ) -> None:
        self._base_url = base_url
        self._connect_timeout = connect_timeout
        self._answer_timeout = answer_timeout
        self._lost_hint = lost_hint

    def _answer(self, text: str | bytes) -> Json:
        """Return what an answer carries; raise what it says of an error."""
        answer = json.loads(text)
        data: Json = answer.get("data") or {}
        if answer.get("type") == "error":
            told, code = error_text(data.get("message"), data.get("errors")), data.get("code")
            if code not in _ENDS:
                raise SessionError(told, code)
            # The close frame that follows has at most the beginning of these words.
            hint = self._lost_hint if code == WSErrorCode.SESSION_ERROR else None
            raise self._ended(SessionError(told, code, hint))
        return data

    def _silent(self, kind: str) -> SessionError:
        """Return the error of an answer that did not come, after which the session is closed."""
        told = f"the {kind} was not answered within {self._answer_timeout:g} s"
        return self._ended(SessionError(f"{told}; the session was closed"))

    def _lost(self, exc: ConnectionClosed) -> SessionError:
        """Return the error of a connection that has ended, and that we had not closed."""
        why = exc.rcvd.reason if exc.rcvd is not None else "the connection was lost"
        told = f"the session has ended: {why or 'closed by the server'}"
        return self._ended(SessionError(told, hint=self._lost_hint))

    def _ended(self, end: SessionError) -> SessionError:
        """Keep why the session has ended, unless that is known; return a new error that says it."""
        self._end = self._end or end
        return SessionError(self._end.message, self._end.code, self._end.hint)


class Session(_Common):
    """A session for synchronous code, open inside of `with`.

    Args:
        base_url: The environment's address, with its token if it wants one.
        connect_timeout: Seconds until it must be open.
        answer_timeout: Seconds until each answer must be there.
        lost_hint: What to do when the session is lost.
    """

    _socket: websockets.sync.client.ClientConnection | None = None

    def __enter__(self) -> Self:
        self._end = None
        try:
            self._socket = websockets.sync.client.connect(
                session_url(self._base_url),
                open_timeout=self._connect_timeout,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None,
            ).__enter__()
        except (OSError, WebSocketException, NoEnvironment) as exc:
            _refuse(self._base_url, exc)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode; `seed`, and what else the environment takes."""
        return _result(self._ask("reset", kwargs))

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return _result(self._ask("step", action))

    def state(self) -> Json:
        """Return the environment's state."""
        return self._ask("state", None)

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._ended(SessionError("the session was closed"))
            self._socket.close()

    def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Json:
        if self._socket is None:
            raise _not_open()
        if self._end is not None:
            raise self._ended(self._end)
        try:
            with suppress(ConnectionClosed):  # why may have been said before
                self._socket.send(_message(kind, data))
            return self._answer(self._socket.recv(self._answer_timeout))
        except TimeoutError as exc:
            silent = self._silent(kind)
            self.close()  # a late answer would be taken for the next one's
            raise silent from exc
        except ConnectionClosed as exc:
            raise self._lost(exc) from exc


class AsyncSession(_Common):
    """A session for asyncio, open inside of `async with`; the arguments are those of `Session`."""

    _socket: websockets.asyncio.client.ClientConnection | None = None

    async def __aenter__(self) -> Self:
        self._end = None
        try:
            self._socket = await websockets.asyncio.client.connect(
                session_url(self._base_url),
                open_timeout=self._connect_timeout,
                max_size=MAX_MESSAGE_BYTES,
                proxy=None,
            )
        except (OSError, WebSocketException, NoEnvironment) as exc:
            _refuse(self._base_url, exc)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def reset(self, **kwargs: Any) -> StepResult:
        """Begin an episode; `seed`, and what else the environment takes."""
        return _result(await self._ask("reset", kwargs))

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Take a step."""
        return _result(await self._ask("step", action))

    async def state(self) -> Json:
        """Return the environment's state."""
        return await self._ask("state", None)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._ended(SessionError("the session was closed"))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Json:
        import asyncio  # 30 ms that synchronous code does without

        if self._socket is None:
            raise _not_open()
        if self._end is not None:
            raise self._ended(self._end)
        try:
            with suppress(ConnectionClosed):  # why may have been said before
                await self._socket.send(_message(kind, data))
            async with asyncio.timeout(self._answer_timeout):
                return self._answer(await self._socket.recv())
        except TimeoutError as exc:
            silent = self._silent(kind)
            await self.close()  # a late answer would be taken for the next one's
            raise silent from exc
        except ConnectionClosed as exc:
            raise self._lost(exc) from exc


def synchronous_session(base_url: str, lost_hint: str) -> AbstractContextManager[AnySession]:
    """Return a session to enter: of OpenEnv's `GenericEnvClient`, or ours without that."""
    if (upstream := _upstream()) is None:
        return Session(base_url, lost_hint=lost_hint)
    session: AbstractContextManager[AnySession] = upstream(
        base_url=base_url, connect_timeout_s=CONNECT_SECONDS
    ).sync()
    return session


def asynchronous_session(
    base_url: str, lost_hint: str
) -> AbstractAsyncContextManager[AnyAsyncSession]:
    """Return the same for asyncio."""
    if (upstream := _upstream()) is None:
        return AsyncSession(base_url, lost_hint=lost_hint)
    session: AbstractAsyncContextManager[AnyAsyncSession] = upstream(
        base_url=base_url, connect_timeout_s=CONNECT_SECONDS
    )
    return session


def _upstream() -> Any:
    try:
        return importlib.import_module("openenv").GenericEnvClient
    except (ImportError, AttributeError):
        return None


def _message(kind: str, data: Mapping[str, Any] | None) -> str:
    return json.dumps({"type": kind} if data is None else {"type": kind, "data": data})


def _result(data: Json) -> StepResult:
    return StepResult(data.get("observation") or {}, data.get("reward"), bool(data.get("done")))


def _refuse(base_url: str, exc: Exception) -> NoReturn:
    address, _ = without_token(base_url)
    why = str(exc) or type(exc).__name__
    if isinstance(exc, InvalidStatus) and exc.response.body:
        why += f": {exc.response.body.decode(errors='replace').strip()}"
    raise SessionError(f"no session could be opened at {address}: {why}") from exc


def _not_open() -> SessionError:
    return SessionError("the session is not open: with env.connect() as session: …")
