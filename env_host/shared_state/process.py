# SPDX-License-Identifier: Apache-2.0
"""The process that holds the shared state: the supervisor's handle on it, and its server.

It takes connections, calls the state's methods, and replies:

    class Choir:                                    # what `create_state()` returns
        def mix(self, body: bytes, *, at: int, session: int) -> tuple[dict, bytes]: ...
        async def wait_for_song(self) -> dict: ...
        def session_ended(self, session: int) -> None: ...   # called here, once for each
        def close(self) -> None: ...                         # called here, at the orderly end

Every public method may be called. A parameter named `session` gets the number of the calling
session (an int, never given to two sessions), one named `body` the call's bytes, when it has any.
A method returns None, a JSON value, bytes, or (JSON value, bytes).

Synchronous methods run to completion on the event loop, one at a time, so all sessions see one
consistent state. Asynchronous methods run concurrently. When a connection closes, its sessions end:
the state is notified of each one once (`session_ended`), after that session's last call.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Never

from ...system.process import forking
from ...system.process.backoff import RestartSchedule
from ...system.process.proc import reap
from ...system.process.signal_pipe import take_over
from ...system.text.json_lines import decode_line, encode_line
from ..environment.definition import is_bundled
from ..errors import StartError
from ..event_loop import run_loop
from .connection import EXPIRED, MAX_CALLS, socket_name
from .frames import Buffer, Frame, Kind, WireError, WireProtocol, encode, encode_value

BACKLOG = 128  # the listen backlog: how many shards may be connecting at once
STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
WATCH_SECONDS = 1.0  # how often it checks that its supervisor is alive

EXIT_STATE_FAILED = 4  # `create_state` raised
STATE_CONFIG = "shared_state"  # the key of the `StateConfig` in the values passed to `spawn`

SESSIONS_PER_CONNECTION = 2**32
RESERVED = frozenset({"session_ended", "close"})  # never called by a client
MAX_MESSAGE_CHARS = 10_000  # of an exception
_CREDENTIALS = struct.Struct("=iII")  # of a peer: pid, uid, gid
_NO_ANSWER = encode_line({"failed": "it ended before it was ready"})

Spawn = Callable[[dict[str, Any], tuple[int, ...]], int]  # from values and descriptors to a pid

log = logging.getLogger("openenvd.env_host")


class StateConfig(NamedTuple):
    """The configuration of a state process."""

    epoch: int
    supervisor_pid: int
    listen_fd: int
    ready_fd: int


class StateProcess:
    """The state process of one supervisor. The supervisor must be single-threaded."""

    def __init__(
        self, env_class: Any, kept_fds: Iterable[int] | None = None, spawn: Spawn | None = None
    ) -> None:
        """Listen on a socket to which only this user may connect.

        `start` creates the process, which keeps the descriptors `kept_fds` (None: all). Where
        forking is not safe, `spawn` starts it as a program instead.
        """
        self._env_class = env_class
        self._kept_fds = kept_fds
        self._spawn = spawn
        self._folder: str | None = None
        if sys.platform == "linux":  # a name without a file: nothing is left after a SIGKILL
            self.address = f"@openenvd-world-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="oe-world-")  # 0700
            self.address = f"{self._folder}/state"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(BACKLOG)
        self.listen_fd = self._listener.fileno()
        self.restarts = RestartSchedule()  # for one process, with index 0
        self.epoch = 0
        self.pid: int | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start the next process, and with `wait` return once it is ready. Raises `StartError`."""
        assert self.pid is None
        self.epoch += 1
        self.restarts.cancel()
        self._started_at = time.monotonic()
        reading, writing = os.pipe()
        config = StateConfig(self.epoch, os.getpid(), self.listen_fd, writing)
        if self._spawn is not None:
            self.pid = self._spawn({STATE_CONFIG: config._asdict()}, (self.listen_fd, writing))
        elif (pid := os.fork()) == 0:
            _become(self._env_class, config, self._kept_fds)
        else:
            self.pid = pid
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = decode_line(pipe.readline() or _NO_ANSWER) if wait else {}
        if "failed" in answer:
            self.stop()
            raise StartError(f"the shared state could not be created: {answer['failed']}")

    def reap(self) -> dict[str, Any] | None:
        """Return the facts of its exit, if it has exited, as in `shard_exit`; schedule the next."""
        if self.pid is None:
            return None
        ended, status, usage = reap(self.pid)
        if not ended:
            return None
        self.pid = None
        now = time.monotonic()
        seconds = round(now - self._started_at, 3)
        self.restarts.exited(0, seconds=seconds, now=now)
        facts = {"shard": None, "shared_state": True, "pid": ended, "generation": self.epoch}
        peak_bytes = usage.ru_maxrss * 1024
        return facts | {"wait_status": status, "seconds": seconds, "peak_bytes": peak_bytes}

    def start_if_due(self) -> None:
        """Start the next process if one is due; early exits delay it, but never prevent it."""
        if self.restarts.take_due(time.monotonic()):
            try:
                self.start(wait=False)
            except OSError as exc:  # a process could not be created: the supervisor keeps running
                self.restarts.could_not_start(0, time.monotonic())
                log.warning("the shared state has no process yet: %s", exc)

    def stop(self) -> None:
        """Stop the process, and remove the socket; returns when it has exited. Idempotent."""
        self.restarts.cancel()
        if (pid := self.pid) is not None:
            self.pid, deadline = None, time.monotonic() + STOP_SECONDS
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                while not os.waitpid(pid, os.WNOHANG)[0]:
                    if time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.005)
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def serve_as_program(env_class: Any, values: dict[str, Any]) -> Never:
    """Be the state process of a supervisor that could not fork; `values` is what `spawn` got."""
    config = StateConfig(**values)
    for fd in (config.listen_fd, config.ready_fd):
        os.set_inheritable(fd, False)
    _become(env_class, config, None)


def _become(env_class: Any, config: StateConfig, kept_fds: Iterable[int] | None) -> Never:
    """Serve, then exit. None of the supervisor's own code may run in this child process."""
    try:
        gc.freeze()  # the supervisor's objects must not be finalized here
        if kept_fds is not None:
            kept_fds = (*kept_fds, config.listen_fd, config.ready_fd)
        forking.leave_parent(config.supervisor_pid, f"state {env_class.__name__}", kept_fds)
        # Ctrl-C reaches the supervisor, which then stops this process.
        take_over((signal.SIGINT,), lambda number: signal.signal(number, signal.SIG_IGN))
        try:
            if (create := getattr(env_class, "create_state", None)) is None:
                raise StartError("a class with SHARED_STATE = True needs a create_state()")
            state = create()
        except BaseException as exc:
            _report(config.ready_fd, {"failed": f"{type(exc).__name__}: {exc}"})
            raise
        serving = _serve(state, config)
        run_loop(
            serving, lambda: forking.flush_and_exit(0), has_project_code=not is_bundled(env_class)
        )
    except BaseException:
        traceback.print_exc()
    forking.flush_and_exit(EXIT_STATE_FAILED)


async def _serve(state: Any, config: StateConfig) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    take_over((signal.SIGTERM,), lambda number: loop.add_signal_handler(number, asked.set))
    server, listener = StateServer(state, config.epoch), socket.socket(fileno=config.listen_fd)
    listener.setblocking(False)
    await loop.create_unix_server(lambda: StateConnection(server), sock=listener)
    _report(config.ready_fd, {"ready": True})
    os.close(config.ready_fd)
    while os.getppid() == config.supervisor_pid and not asked.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), WATCH_SECONDS)
    if close := getattr(state, "close", None):
        close()


def _report(fd: int, line: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(fd, encode_line(line))


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
        self._running: dict[asyncio.Task[None], int] = {}  # each task's session
        self._sessions: set[int] = set()
        self._leaving: set[int] = set()  # sessions that end when their last running call returns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send WELCOME to a peer of this user; close the connection of any other user's."""
        super().connection_made(transport)
        is_ours = True  # on macOS the socket's folder keeps other users out
        if hasattr(socket, "SO_PEERCRED"):
            peer, size = transport.get_extra_info("socket"), _CREDENTIALS.size
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            is_ours = _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
        if is_ours:
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
            raise WireError(f"a shard sent a frame of kind {frame.kind} and epoch {frame.epoch}")
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
        if len(self._running) >= 2 * MAX_CALLS:  # a task is removed after its reply
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
