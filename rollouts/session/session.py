# SPDX-License-Identifier: Apache-2.0
"""A WebSocket session at an OpenEnv server, on `websockets`: one call is under way at a time.

    ask ─▶ turn ─▶ send ─▶ receive ─▶ the answer's text, not parsed
                     └─ cancelled, out of time, lost ─▶ the session has ended: `SessionFailed`

An answer does not name its question. After an abandoned call, its late answer would be mistaken for
the next call's, so the session ends with such a call, and each later call raises the reason.
Concurrent calls wait for their turn. Calls from a forked process, which has the socket, too, and
from another event loop, which the socket does not wake, are refused. A session without a reference
is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import Close, CloseCode
from websockets.protocol import State

from ...schema.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER, MAX_MESSAGE_BYTES, NO_SESSIONS
from ...system.net.access import bearer_header, without_token
from .connection import Connection, Message

Server = tuple[str | None, str | None]  # an environment's name and launch, from its handshakes

CONNECT_SECONDS = 30.0  # including the wait in the queue of a full server
CLOSE_SECONDS = 10.0
_CLOSE = '{"type":"close"}'
_FULL = (429, 503)
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_OUR_COMPLAINTS = (CloseCode.PROTOCOL_ERROR, CloseCode.INVALID_DATA, CloseCode.MESSAGE_TOO_BIG)


class SessionEnd(StrEnum):
    """The reason why a session cannot be used."""

    NOT_CONNECTED = "not_connected"  # nothing answers at the address, or it refuses
    NO_CAPACITY = "no_capacity"  # the server has no room for another session
    CONNECTION_LOST = "connection_lost"  # closed by the server, or by the network
    STEP_TIMED_OUT = "step_timed_out"  # a call was not answered in time
    PROTOCOL_ERROR = "protocol_error"  # an invalid WebSocket frame, or an answer without a call
    ABANDONED = "abandoned"  # a call was cancelled before its answer came
    CLOSED = "closed"  # by its own client
    OTHER_PROCESS = "other_process"  # it was opened before a fork
    OTHER_LOOP = "other_loop"  # it was opened in another event loop


class SessionFailed(Exception):
    """A session could not be opened, or has ended; `close` is the server's close frame, if any."""

    def __init__(self, reason: SessionEnd, message: str, close: Close | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.close = close

    def again(self) -> SessionFailed:
        """Return a copy of the exception, for another call."""
        return SessionFailed(self.reason, str(self), self.close)


def session_url(address: str) -> str:
    """Turn `http://host:8000` into `ws://host:8000/ws`; `ValueError` if it is no address."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        named = (parts.hostname or "").encode("idna")  # the form that is resolved
        scheme = _SCHEMES[parts.scheme] if named and parts.port != 0 else None
    except (KeyError, ValueError):  # an invalid scheme, host or port
        scheme = None
    if scheme is None:
        raise ValueError(f"{without_token(address)[0]!r} is not the address of an environment")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


def error_text(error: Mapping[str, Any]) -> str:
    """Return an error's text, with invalid fields, and an exception's class and place."""
    text, errors = str(error.get("message") or "the server gave no reason"), error.get("errors")
    exception, place = error.get("exception"), error.get("place")
    if errors:
        listed = json.dumps(errors, separators=(",", ":"))
        text = listed if exception else f"{text}: {listed}"
    text = f"{exception}: {text}" if exception else text
    return f"{text} ({place})" if place else text


class Session:
    """An open session; `open` makes one."""

    def __init__(self, socket: Connection) -> None:
        headers: Mapping[str, str] = socket.response.headers if socket.response else {}
        self.server: Server = headers.get(ENVIRONMENT_HEADER), headers.get(GENERATION_HEADER)
        self._socket = socket
        self._turn = asyncio.Lock()
        self._pid = os.getpid()
        self._end: SessionFailed | None = None

    @classmethod
    async def open(
        cls,
        address: str,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        ping_seconds: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connect to a server.

        Args:
            address: The server's address, with its token if it requires one.
            connect_seconds: Time limit until it is open, including the queue of a full server.
            close_seconds: Time limit of the server's answer to a close.
            ping_seconds: Seconds between tests of the open connection; None: no tests.
            tls: The context for a secure address; None: Python's default, read each time.

        Raises:
            SessionFailed: Nothing answers, or the server refuses.
            ValueError: It is not the address of an environment.
        """
        shown, token = without_token(address)
        more: dict[str, Any] = {} if tls is None else {"ssl": tls}
        try:
            socket = await connect(
                session_url(shown),
                additional_headers=bearer_header(token),  # proxies and servers log URLs
                open_timeout=connect_seconds,
                close_timeout=close_seconds,
                ping_interval=ping_seconds,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
                create_connection=Connection,
                **more,
            )
        except TimeoutError as exc:
            message = f"{shown} does not answer: no answer within {connect_seconds:g} s"
            raise SessionFailed(SessionEnd.NOT_CONNECTED, message) from exc
        except InvalidStatus as exc:
            status, body = exc.response.status_code, exc.response.body or b""
            reason = SessionEnd.NO_CAPACITY if status in _FULL else SessionEnd.NOT_CONNECTED
            said = body.decode(errors="replace").strip()
            if said == NO_SESSIONS:
                raise SessionFailed(reason, f"{shown}: {said}") from exc
            said = f": {said}" if said else ""
            raise SessionFailed(reason, f"{shown} refuses: {exc}{said}") from exc
        # AssertionError: `websockets` assumes that a server stays until the handshake is sent.
        except (OSError, WebSocketException, AssertionError) as exc:
            message = f"{shown} does not answer: {_said(exc)}"
            raise SessionFailed(SessionEnd.NOT_CONNECTED, message) from exc
        assert isinstance(socket, Connection)
        return cls(socket)

    @property
    def is_open(self) -> bool:
        """Return whether a call is possible, and the next answer would be its own."""
        socket = self._socket
        return self._end is None and socket.state is State.OPEN and socket.unasked is None

    async def ask(self, message: str | bytes, seconds: float | None, what: str) -> Message:
        """Send a message and return the text of the answer.

        Args:
            message: JSON.
            seconds: Time limit of the answer; None: no limit.
            what: The name of the call, for errors: `step`.

        Raises `SessionFailed`: the session has ended, now or before.
        """
        self._check()
        async with self._turn:
            self._check()  # the previous call may have ended the session
            limit = None
            if seconds is not None:  # much cheaper than `asyncio.timeout`
                limit = self._socket.loop.call_later(seconds, self._expire, seconds, what)
            try:
                return await self._exchange(message)
            except ConnectionClosed as exc:
                self._end = self._end or _lost(exc)
                raise self._end.again() from exc
            except SessionFailed as exc:
                self.abort(exc)
                raise
            except BaseException:
                message = f"a {what} was abandoned before its answer came; open another session"
                self.abort(SessionFailed(SessionEnd.ABANDONED, message))
                raise
            finally:
                if limit is not None:
                    limit.cancel()

    async def close(self) -> None:
        """End the session and tell the server; wait a limited time for its answer."""
        if self._pid != os.getpid():
            return  # the process that opened it closes it
        if asyncio.get_running_loop() is not self._socket.loop:
            self._end = self._end or _closed()
            self._abort_from_elsewhere()
            return
        is_open, self._end = self.is_open, self._end or _closed()
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(self._socket.close_timeout):
                if is_open:
                    await self._socket.send(_CLOSE)
                await self._socket.close()
        self._socket.transport.abort()

    async def end(self, seconds: float) -> bool:
        """Send only OpenEnv's close message; return whether the server closes in time."""
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionClosed):
                    await self._socket.send(_CLOSE)
                await self._socket.wait_closed()
        except TimeoutError:
            return False
        return True

    def abort(self, end: SessionFailed | None = None) -> None:
        """Close the socket now; later calls raise `end`."""
        self._end = self._end or end or _closed()
        self._socket.transport.abort()

    def __del__(self) -> None:
        if self._pid == os.getpid() and self._socket.state is not State.CLOSED:
            self._abort_from_elsewhere()

    def _abort_from_elsewhere(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its sockets with it
            self._socket.loop.call_soon_threadsafe(self._socket.transport.abort)

    async def _exchange(self, message: str | bytes) -> Message:
        if (early := self._socket.unasked) is None:
            return await self._socket.exchange(message)
        # A server sends an error on its own to report why it ends a session. Any other message
        # would be mistaken for the answer to this call.
        with contextlib.suppress(ValueError):
            found = json.loads(early)
            if isinstance(found, dict) and found.get("type") == "error":
                return early
        message = "the server sent a message that answers no call"
        raise SessionFailed(SessionEnd.PROTOCOL_ERROR, message)

    def _expire(self, seconds: float, what: str) -> None:
        message = f"the {what} was not answered within {seconds:g} s; the session was closed"
        self.abort(SessionFailed(SessionEnd.STEP_TIMED_OUT, message))

    def _check(self) -> None:
        if self._pid != os.getpid():
            message = f"the session was opened by process {self._pid}; open one in this process"
            raise SessionFailed(SessionEnd.OTHER_PROCESS, message)
        if self._end is not None:
            raise self._end.again()
        if asyncio.get_running_loop() is not self._socket.loop:
            message = "the session was opened in another event loop; open one in this one"
            raise SessionFailed(SessionEnd.OTHER_LOOP, message)


def _said(exc: Exception) -> str:
    """Return the text of an error; of a system error, without the event loop's addition."""
    errno = exc.errno if isinstance(exc, OSError) else None
    return os.strerror(errno) if errno and errno > 0 else str(exc) or type(exc).__name__


def _closed() -> SessionFailed:
    return SessionFailed(SessionEnd.CLOSED, "the session was closed")


def _lost(exc: ConnectionClosed) -> SessionFailed:
    sent, received = exc.sent, exc.rcvd
    if sent is not None and sent.code in _OUR_COMPLAINTS and not exc.rcvd_then_sent:
        message = f"the connection was closed after a protocol error: {sent.reason or sent}"
        return SessionFailed(SessionEnd.PROTOCOL_ERROR, message)
    if received is None:
        message = f"the connection was lost: {exc.__cause__ or exc}"
        return SessionFailed(SessionEnd.CONNECTION_LOST, message)
    message = f"the connection was lost: {received}"
    return SessionFailed(SessionEnd.CONNECTION_LOST, message, received)
