# SPDX-License-Identifier: Apache-2.0
"""The state process's half: takes connections, calls the state's methods, replies.

    listener (the supervisor's) ─▶ StateConnection: one shard
                                                      CALL ─▶ method ─▶ REPLY or FAILURE

Plain methods run to their end on the loop, one after the other: that is what makes the state one.
Asynchronous ones run beside each other. A connection's end is the end of its sessions: the state
is notified once for each (`session_ended`), after the last of its calls.

Frames are checked (length, kind, epoch, limits). A peer that breaks the protocol loses its
connection; the others are not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from . import frames as wire
from .errors import BodyTooLarge, WireError
from .frames import Frame, Kind, Limits
from .methods import EXPIRED, SESSION_ENDED, Method, encode_result, methods_of

SESSIONS_PER_CONNECTION = 2**32
_CREDENTIALS = struct.Struct("=iII")  # of a peer: pid, uid, gid

log = logging.getLogger("openenvd.env_host")


class StateServer:
    """Serves one state to every shard that connects."""

    def __init__(
        self, state: Any, epoch: int, greeting_seconds: float = Limits.greeting_seconds
    ) -> None:
        self.epoch = epoch
        self.greeting_seconds = greeting_seconds
        self.methods: dict[str, Method] = methods_of(state)
        self.session_ended: Callable[[int], None] | None = getattr(state, SESSION_ENDED, None)
        self._numbers = itertools.count(1)
        self._opening: set[asyncio.Task[Any]] = set()

    def listen(self, listener: socket.socket) -> None:
        """Accept connections of `listener` from now on."""
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        if not _is_ours(connection):
            connection.close()
            return
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        peer = StateConnection(self, next(self._numbers))
        task = loop.create_task(loop.connect_accepted_socket(lambda: peer, connection))
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.debug("shared state: a connection ended at once: %r", exc)


class StateConnection(wire.WireProtocol):
    """The connection of one shard to the state process."""

    def __init__(self, server: StateServer, number: int) -> None:
        super().__init__()
        self._server = server
        self._number = number
        self._greeted = False
        self._shard = "?"
        self._running: dict[asyncio.Task[None], int] = {}  # and the session each is for
        self._sessions: set[int] = set()
        self._leaving: set[int] = set()  # of those, which end with their last call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the shard some seconds to send HELLO."""
        super().connection_made(transport)
        self._greeting = self._loop.call_later(self._server.greeting_seconds, self.close)

    def pause_writing(self) -> None:
        """Stop reading from a shard that does not read its replies."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read from the shard again."""
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the shard's sessions, once their running calls have finished."""
        super().connection_lost(exc)
        self._greeting.cancel()
        self._end_sessions()

    def _note_fault(self, exc: WireError) -> None:
        fields = {"shard": self._shard, "generation": self._server.epoch}
        log.warning("shared state: connection of %s closed: %s", self._shard, exc, extra=fields)

    def _handle(self, frame: Frame) -> None:
        if not self._greeted:
            self._welcome(frame)
        elif frame.epoch != self._server.epoch:
            raise WireError(f"a frame of epoch {frame.epoch}; this is {self._server.epoch}")
        elif frame.kind == Kind.CALL:
            self._call(frame)
        elif frame.kind == Kind.LEAVE:
            self._leave(frame.session)
        else:
            raise WireError(f"a frame of kind {frame.kind} from a shard")

    def _welcome(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO or not frame.name:
            raise WireError("the first frame is not HELLO")
        self._greeted = True
        self._greeting.cancel()
        self._shard = frame.name
        value = wire.encode_value({"pid": os.getpid()})
        self.send(wire.encode(Kind.WELCOME, epoch=self._server.epoch, value=value))

    def _call(self, frame: Frame) -> None:
        if frame.value is not None and not isinstance(frame.value, dict):
            raise WireError("a call with unnamed arguments")
        if len(self._running) >= 2 * Limits.max_calls:  # a task goes only after its reply went
            raise WireError(f"more than {Limits.max_calls} calls at once")
        self._sessions.add(frame.session)
        method = self._server.methods.get(frame.name)
        if method is None:
            self._fail(frame, "AttributeError", f"the shared state has no method {frame.name!r}")
        elif frame.deadline_us and time.monotonic() * 1e6 >= frame.deadline_us:
            self._fail(frame, EXPIRED, "its deadline passed before it started")
        elif method.is_async:
            task = asyncio.get_running_loop().create_task(self._run(method, frame))
            self._running[task] = frame.session
            task.add_done_callback(self._ran)
        else:
            try:
                result = method.call(self._session_of(frame), frame.value, frame.body)
                self._reply(frame, result)
            except Exception as exc:
                self._raised(frame, exc)

    async def _run(self, method: Method, frame: Frame) -> None:
        try:
            async with asyncio.timeout(_seconds_left(frame)) as patience:
                result = await method.call(self._session_of(frame), frame.value, frame.body)
            self._reply(frame, result)
        except Exception as exc:
            if patience.expired():
                self._fail(frame, EXPIRED, "it was cancelled at its deadline")
            else:
                self._raised(frame, exc)

    def _ran(self, task: asyncio.Task[None]) -> None:
        session = self._running.pop(task)
        if self._transport is None:
            self._end_sessions()
        elif session in self._leaving:
            self._leave(session)

    def _reply(self, frame: Frame, result: Any) -> None:
        value, body, flags = encode_result(result)
        if body is not None and len(body) > wire.MAX_BODY_BYTES:
            raise BodyTooLarge(f"it returned {len(body)} bytes, more than {wire.MAX_BODY_BYTES}")
        self._answer(Kind.REPLY, frame, value, body, flags)

    def _raised(self, frame: Frame, exc: Exception) -> None:
        log.debug("shared state: %s raised", frame.name, exc_info=exc)
        self._fail(frame, type(exc).__name__, str(exc))

    def _fail(self, frame: Frame, kind: str, message: str) -> None:
        value = wire.encode_value({"type": kind, "message": message})
        self._answer(Kind.FAILURE, frame, value)

    def _answer(
        self, kind: Kind, frame: Frame, value: bytes, body: bytes | None = None, flags: int = 0
    ) -> None:
        self.send(
            wire.encode(
                kind,
                epoch=self._server.epoch,
                session=frame.session,
                request_id=frame.request_id,
                value=value,
                body=body,
                flags=flags,
            )
        )

    def _session_of(self, frame: Frame) -> int:
        return self._number * SESSIONS_PER_CONNECTION + frame.session

    def _leave(self, session: int) -> None:
        if session not in self._sessions:
            return
        if session in self._running.values():
            self._leaving.add(session)
            return
        self._sessions.discard(session)
        self._leaving.discard(session)
        self._notify_end(session)

    def _end_sessions(self) -> None:
        if self._running:
            return
        sessions, self._sessions = self._sessions, set()
        for session in sorted(sessions):
            self._notify_end(session)

    def _notify_end(self, session: int) -> None:
        if self._server.session_ended is None:
            return
        try:
            self._server.session_ended(self._number * SESSIONS_PER_CONNECTION + session)
        except Exception:
            log.warning("shared state: session_ended raised", exc_info=True)


def _seconds_left(frame: Frame) -> float | None:
    if not frame.deadline_us:
        return None
    return max(frame.deadline_us / 1e6 - time.monotonic(), 0)


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the peer is of this user; elsewhere the socket's folder keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(uid == os.geteuid())
