# SPDX-License-Identifier: Apache-2.0
"""The state process's half: takes connections, calls the state's methods, replies.

    class Choir:                                    # what `create_state()` returns
        def mix(self, body: bytes, *, at: int, session: int) -> tuple[dict, bytes]: ...
        async def wait_for_song(self) -> dict: ...
        def session_ended(self, session: int) -> None: ...   # called here, once for each
        def close(self) -> None: ...                         # called here, at the orderly end

Every public method may be called. A parameter named `session` gets the number of the calling
session (an int, never given to two sessions), one named `body` the call's bytes, when it has any.
A method returns None, a JSON value, bytes, or (JSON value, bytes).

Plain methods run to their end on the loop, one after the other: that is what makes the state one.
Asynchronous ones run beside each other. A connection's end is the end of its sessions: the state
is notified once for each (`session_ended`), after the last of its calls.

Frames are checked (length, kind, epoch, limits). A peer that breaks the protocol loses its
connection; the others are not affected.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .connection import EXPIRED, MAX_CALLS
from .errors import WireError
from .frames import Buffer, Frame, Kind, WireProtocol, encode, encode_value

SESSIONS_PER_CONNECTION = 2**32
RESERVED = frozenset({"session_ended", "close"})  # never called by a client
MAX_MESSAGE_CHARS = 10_000  # of an exception
_CREDENTIALS = struct.Struct("=iII")  # of a peer: pid, uid, gid

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the state that clients may call; its signature is inspected once."""

    function: Callable[..., Any]
    is_async: bool
    takes_session: bool
    takes_body: bool

    def call(self, session: int, arguments: dict[str, Any], body: bytes | None) -> Any:
        """Return the result of the method, or an awaitable of it.

        Raises:
            TypeError: The arguments are not what it takes.
        """
        if self.takes_session:
            arguments["session"] = session
        if body is None:
            return self.function(**arguments)
        if not self.takes_body:
            raise TypeError("it takes no bytes: it has no parameter named `body`")
        return self.function(body=body, **arguments)


def methods_of(state: Any) -> dict[str, Method]:
    """Return the methods that clients may call, by name."""
    names = {name for name in dir(type(state)) if not name.startswith("_")} - RESERVED
    methods = {}
    for name in names:
        if inspect.isroutine(function := getattr(state, name)):
            taken = inspect.signature(function).parameters
            is_async = inspect.iscoroutinefunction(function)
            methods[name] = Method(function, is_async, "session" in taken, "body" in taken)
    return methods


class StateServer:
    """Serves one state to every shard that connects."""

    def __init__(self, state: Any, epoch: int) -> None:
        self.epoch = epoch
        self.methods = methods_of(state)
        self.session_ended: Callable[[int], None] | None = getattr(state, "session_ended", None)
        self.numbers = itertools.count(1)  # of connections

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections of `listener` from now on."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_server(lambda: StateConnection(self), sock=listener)


class StateConnection(WireProtocol):
    """The connection of one shard to the state process."""

    def __init__(self, server: StateServer) -> None:
        super().__init__()
        self._server = server
        self._first_session = next(server.numbers) * SESSIONS_PER_CONNECTION
        self._running: dict[asyncio.Task[None], int] = {}  # and the session each is for
        self._sessions: set[int] = set()
        self._leaving: set[int] = set()  # of those, which end with their last call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet a peer of this user; leave any other."""
        super().connection_made(transport)
        if _is_ours(transport.get_extra_info("socket")):
            pid = encode_value(os.getpid())
            self.send(encode(Kind.WELCOME, self._server.epoch, value=pid))
        else:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the shard's sessions, once their running calls have finished."""
        super().connection_lost(exc)
        self._end_sessions()

    def _handle(self, frame: Frame) -> None:
        if frame.epoch != self._server.epoch:
            raise WireError(f"a frame of epoch {frame.epoch}; this is {self._server.epoch}")
        if frame.kind == Kind.CALL:
            self._call(frame)
        elif frame.kind == Kind.LEAVE:
            self._leave(frame.session)
        else:
            raise WireError(f"a frame of kind {frame.kind} from a shard")

    def _call(self, frame: Frame) -> None:
        match frame.value:
            case [str(name), float(deadline), dict(arguments)]:
                method = self._server.methods.get(name)
            case _:
                raise WireError("a call without method, deadline and named arguments")
        if len(self._running) >= 2 * MAX_CALLS:  # a task goes only after its reply went
            raise WireError(f"more than {MAX_CALLS} calls at once")
        self._sessions.add(frame.session)
        seconds_left = deadline - time.monotonic()
        if method is None:
            self._fail(frame, "AttributeError", f"the shared state has no method {name!r}")
        elif seconds_left <= 0:
            self._fail(frame, EXPIRED, "its deadline passed before it started")
        elif method.is_async:
            task = asyncio.create_task(self._run(method, frame, arguments, seconds_left))
            self._running[task] = frame.session
            task.add_done_callback(self._ran)
        else:
            try:
                session = self._first_session + frame.session
                self._reply(frame, method.call(session, arguments, frame.body))
            except Exception as exc:
                self._raised(frame, exc)

    async def _run(
        self, method: Method, frame: Frame, arguments: dict[str, Any], seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(seconds) as patience:
                session = self._first_session + frame.session
                result = await method.call(session, arguments, frame.body)
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
        value, body = result, None
        if isinstance(result, Buffer):
            value, body = None, bytes(result)
        elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Buffer):
            value, body = result[0], bytes(result[1])
        has_value = value is not None or isinstance(result, tuple)
        self._send(Kind.REPLY, frame, encode_value(value) if has_value else b"", body)

    def _raised(self, frame: Frame, exc: Exception) -> None:
        log.debug("shared state: a method raised", exc_info=exc)
        self._fail(frame, type(exc).__name__, str(exc))

    def _fail(self, frame: Frame, kind: str, message: str) -> None:
        text = message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
        self._send(Kind.FAILURE, frame, encode_value([kind, text]), None)

    def _send(self, kind: Kind, frame: Frame, value: bytes, body: bytes | None) -> None:
        self.send(encode(kind, self._server.epoch, frame.session, frame.request_id, value, body))

    def _leave(self, session: int) -> None:
        if session in self._running.values():
            self._leaving.add(session)
        elif session in self._sessions:
            self._leaving.discard(session)
            self._sessions.discard(session)
            self._notify_end(session)

    def _end_sessions(self) -> None:
        if not self._running:
            sessions, self._sessions = self._sessions, set()
            for session in sorted(sessions):
                self._notify_end(session)

    def _notify_end(self, session: int) -> None:
        if self._server.session_ended is None:
            return
        try:
            self._server.session_ended(self._first_session + session)
        except Exception:
            log.warning("shared state: session_ended raised", exc_info=True)


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the peer is of this user; elsewhere the socket's folder keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
