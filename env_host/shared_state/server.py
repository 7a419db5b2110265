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
from typing import Any

from .connection import EXPIRED, MAX_CALLS
from .frames import Buffer, Frame, Kind, WireError, WireProtocol, encode, encode_value

SESSIONS_PER_CONNECTION = 2**32
RESERVED = frozenset({"session_ended", "close"})  # never called by a client
MAX_MESSAGE_CHARS = 10_000  # of an exception
_CREDENTIALS = struct.Struct("=iII")  # of a peer: pid, uid, gid

log = logging.getLogger("openenvd.env_host")


class Method:
    """A method of the state that clients may call; its signature is inspected once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = inspect.signature(function).parameters
        self.is_async = inspect.iscoroutinefunction(function)

    def call(self, session: int, arguments: dict[str, Any], body: bytes | None) -> Any:
        """Return its result, or an awaitable of it; raises `TypeError` for other arguments."""
        if "session" in self._parameters:
            arguments["session"] = session
        if body is None:
            return self._function(**arguments)
        if "body" not in self._parameters:
            raise TypeError("it takes no bytes: it has no parameter named `body`")
        return self._function(body=body, **arguments)


def methods_of(state: Any) -> dict[str, Method]:
    """Return the methods that clients may call, by name."""
    names = {name for name in dir(type(state)) if not name.startswith("_")} - RESERVED
    found = {name: getattr(state, name) for name in names}
    return {name: Method(each) for name, each in found.items() if inspect.isroutine(each)}


class StateServer:
    """The one state that the connections of all shards share."""

    def __init__(self, state: Any, epoch: int) -> None:
        self.epoch = epoch
        self.methods = methods_of(state)
        self.session_ended = getattr(state, "session_ended", lambda session: None)
        self.numbers = itertools.count(1)  # of connections


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
            self.send(encode(Kind.WELCOME, self._server.epoch, value=b"%d" % os.getpid()))
        else:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the shard's sessions."""
        super().connection_lost(exc)
        for session in sorted(self._sessions):
            self._leave(session)

    def _handle(self, frame: Frame) -> None:
        if frame.epoch != self._server.epoch or frame.kind not in (Kind.CALL, Kind.LEAVE):
            raise WireError(f"a frame of kind {frame.kind} and epoch {frame.epoch} of a shard")
        if frame.kind == Kind.CALL:
            self._call(frame)
        else:
            self._leave(frame.session)

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
        if session in self._leaving:
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
        """End a session, if there is one, after the last of its calls."""
        if session in self._running.values():
            self._leaving.add(session)
        elif session in self._sessions:
            self._leaving.discard(session)
            self._sessions.discard(session)
            try:
                self._server.session_ended(self._first_session + session)
            except Exception:
                log.warning("shared state: session_ended raised", exc_info=True)


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the peer is of this user; on macOS the socket's folder keeps others out."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
