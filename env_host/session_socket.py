# SPDX-License-Identifier: Apache-2.0
"""One client on `/ws`: the hot path.

One frame is always being read ahead. Its arrival is how a client that leaves in the middle of a
call is noticed at once; its answer waits until the call is done, so that calls never overlap.

    receive ──▶ answer ──▶ send          `_wait` is the only place that waits,
       ▲           │                     and `end` and a departing client the
       └───────────┘                     only two that interrupt it
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from pydantic import ValidationError

from . import frames
from .calls import Calls, keep_accepted, serialize
from .errors import SessionEnded, SessionError
from .mcp import Mcp
from .protocol import WSErrorCode
from .sessions import Session, SessionTable

NORMAL_CLOSE = 1000
INTERNAL_ERROR_CLOSE = 1011

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

log = logging.getLogger("openenvd.env_host")


class ClientLeft(Exception):
    """The client has closed the connection."""


class SocketDoor:
    """One WebSocket: accepting, reading ahead, waiting, ending. Knows no messages."""

    def __init__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._incoming: asyncio.Task[dict[str, Any]] | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._over: ClientLeft | SessionEnded | None = None

    @property
    def transport(self) -> Any:
        """The connection's transport: uvicorn's `send` is a method of the protocol that has it."""
        return getattr(getattr(self._send, "__self__", None), "transport", None)

    def query(self, name: str) -> str | None:
        """A parameter of the address."""
        found = parse_qs(self._scope.get("query_string", b"").decode("latin-1")).get(name)
        return found[0] if found else None

    def end(self, reason: ClientLeft | SessionEnded) -> None:
        """Interrupt whatever is being waited for; the first reason counts."""
        self._over = self._over or reason
        if self._waiting is not None:
            self._waiting.cancel()

    async def accept(self) -> None:
        """Complete the handshake and begin to read ahead."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        self._read_ahead()

    async def next_text(self) -> str:
        """The next text frame.

        Raises:
            ClientLeft, SessionEnded: there will be none.
            SessionError: the frame is binary.
        """
        assert self._incoming is not None
        message = await self.wait(self._incoming)
        if message["type"] == "websocket.disconnect":
            raise ClientLeft
        self._read_ahead()
        text: str | None = message.get("text")
        if text is None:
            raise SessionError("Expected a text frame, got a binary one")
        return text

    async def wait(self, call: asyncio.Future[Any]) -> Any:
        """The result of `call`, which is cancelled when the client leaves or `end` is called.

        Raises:
            ClientLeft, SessionEnded: instead of a cancelled call's error.
        """
        self._waiting = call
        if self._over is not None:
            call.cancel()
        try:
            return await call
        except asyncio.CancelledError:
            if self._over is not None:
                raise self._over from None
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the environment cancelled its own call") from None
        finally:
            self._waiting = None

    async def send_text(self, text: str) -> None:
        """Send one frame.

        Raises:
            ClientLeft: nobody is there any more.
        """
        try:
            await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError) as exc:  # which one depends on the server's version
            raise ClientLeft from exc

    async def finish(self, text: str | None = None, code: int = NORMAL_CLOSE) -> None:
        """Say a last word, if any, and close; tolerates that the client is gone."""
        if self._incoming is not None and not self._incoming.done():
            self._incoming.cancel()
        try:
            if text is not None:
                await self.send_text(text)
            await self._send({"type": "websocket.close", "code": code})
        except (ClientLeft, OSError, RuntimeError):
            return

    def _read_ahead(self) -> None:
        self._incoming = self._loop.create_task(self._read())
        self._incoming.add_done_callback(self._arrived)

    async def _read(self) -> dict[str, Any]:
        return await self._receive()

    def _arrived(self, incoming: asyncio.Task[dict[str, Any]]) -> None:
        if incoming.cancelled() or incoming is self._waiting:
            return
        if incoming.exception() or incoming.result()["type"] == "websocket.disconnect":
            self.end(ClientLeft())


class SessionSocket(SocketDoor):
    """One session over one WebSocket: reset, step, state, mcp, close."""

    def __init__(
        self,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        *,
        table: SessionTable,
        mcp: Mcp,
        step_timeout_seconds: float | None,
    ) -> None:
        super().__init__(scope, receive, send)
        self._table = table
        self._mcp = mcp
        self._step_timeout_seconds = step_timeout_seconds
        self._session: Session | None = None
        self._attached = False  # to a session that somebody else began
        self._abandoned = False  # a call was still running when the session ended

    async def serve(self) -> None:
        """Serve the client until either side ends the session."""
        await self.accept()
        last_word, code = None, NORMAL_CLOSE
        try:
            await self._open()
            await self._converse()
        except ClientLeft:
            pass
        except SessionError as exc:
            last_word = frames.error_frame(str(exc), exc.code, **exc.details())
            code = exc.close_code if isinstance(exc, SessionEnded) else code
        except Exception as exc:
            log.warning("a session ended with an error", exc_info=True)
            last_word = frames.error_frame(str(exc), WSErrorCode.SESSION_ERROR)
        finally:
            # The slot first: a client that sees the close must find room for its next session.
            # Shielded: a server that cancels us on its way out must not leave one behind.
            await asyncio.shield(self._let_go())
            await self.finish(last_word, code)

    async def _open(self) -> None:
        """Attach to the session that the address names, or begin a new one."""
        if wanted := self.query("session_id"):
            self._attached = True
            self._session = self._table.attach(wanted, self)
            return
        session = self._session = await self._table.reserve(self)
        await self._call(session.create())
        await session.enter()

    async def _converse(self) -> None:
        while (reply := await self._answer(await self.next_text())) is not None:
            await self.send_text(reply)

    async def _answer(self, text: str) -> str | None:
        """The frame that answers `text`; None ends the session."""
        try:
            message = frames.decode(text)
        except json.JSONDecodeError as exc:
            return frames.error_frame(f"Invalid JSON: {exc}", WSErrorCode.INVALID_JSON)
        kind = message.get("type", "")  # not an object: the session ends, as upstream's does
        try:
            return await self._dispatch(kind, message)
        except (ClientLeft, SessionError):
            raise
        except ValidationError as exc:
            return frames.validation_frame(exc)
        except Exception as exc:
            log.warning("%s failed", kind, exc_info=True)
            return frames.error_frame(str(exc), WSErrorCode.EXECUTION_ERROR)

    async def _dispatch(self, kind: Any, message: dict[str, Any]) -> str | None:
        match kind:
            case "step":
                return await self._step(frames.data_of(message))
            case "reset":
                return await self._reset(frames.data_of(message))
            case "state":
                frames.data_of(message)
                return await self._state()
            case "mcp":
                return await self._speak_mcp(frames.data_of(message))
            case "close":
                frames.data_of(message)
                return None
            case _:
                text = f"Unknown message type: {kind}"
                return frames.error_frame(text, WSErrorCode.UNKNOWN_TYPE)

    async def _step(self, data: dict[str, Any]) -> str:
        session, calls = self._ready()
        action = self._table.definition.parse_action(data)
        call = session.begin(calls.step, calls.step_is_async, action)
        observation = await self._call(call, "step")
        return frames.observation_frame(serialize(observation))

    async def _reset(self, data: dict[str, Any]) -> str:
        session, calls = self._ready()
        arguments = keep_accepted(calls.reset, data)
        call = session.begin(calls.reset, calls.reset_is_async, **arguments)
        observation = await self._call(call, "reset")
        return frames.observation_frame(serialize(observation))

    async def _state(self) -> str:
        session, calls = self._ready()
        if calls.state_is_threaded:
            return frames.state_frame(await self._call(session.thread.run(calls.read_state)))
        return frames.state_frame(calls.read_state())

    async def _speak_mcp(self, data: dict[str, Any]) -> str:
        session, _ = self._ready()
        call = asyncio.ensure_future(self._mcp.answer(data, session))
        return frames.mcp_frame(await self._call(call))

    def _ready(self) -> tuple[Session, Calls]:
        session = self._session
        assert session is not None
        return session, session.ready_calls

    async def _call(self, call: asyncio.Future[Any], timed: str | None = None) -> Any:
        """Wait for one call of the environment; `timed` names it in the time-out's message."""
        session = self._session
        assert session is not None
        limit = self._step_timeout_seconds if timed else None
        timer = self._loop.call_later(limit, self._time_out, str(timed), limit) if limit else None
        session.busy += 1
        try:
            return await self.wait(call)
        except (ClientLeft, SessionEnded):
            self._abandoned = not isinstance(call, asyncio.Task)  # a thread cannot be interrupted
            raise
        finally:
            session.busy -= 1
            session.touch()
            if timer is not None:
                timer.cancel()

    def _time_out(self, what: str, limit: float) -> None:
        session = self._session
        log.warning("session %s: %s ran past %g s", session.id if session else "?", what, limit)
        text = f"The {what} did not finish within {limit:g} s; the session has ended."
        self.end(SessionEnded(text, INTERNAL_ERROR_CLOSE))

    async def _let_go(self) -> None:
        session = self._session
        if session is None:
            return
        if self._attached:
            await self._table.detach(session)
        else:
            await self._table.close(session, abandoned=self._abandoned)
