# SPDX-License-Identifier: Apache-2.0
"""Sessions: who is here, how many may be, and how one begins and ends.

`SessionTable` owns the slots. It lives on the event loop alone, so it needs no lock; every check
and the reservation that follows it happen without an await in between.

A slot is free again as soon as its session ends, even while a call that will not return still
holds the session's thread. The exception is a class that allows one session at a time: there the
slot stays taken until its environment is closed, and a newcomer waits a moment for that.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol

from .calls import Calls
from .definition import Definition
from .errors import CapacityReached, FactoryFailed, SessionEnded, UnknownSession
from .session_thread import SessionThread

CLOSE_SECONDS = 10.0  # how long a session's end waits for its environment's `close`
HAND_OVER_SECONDS = 5.0  # how long a newcomer waits for a session that is closing already
MAX_PASSING = 32  # environments at once that serve one HTTP request each

log = logging.getLogger("openenvd.env_host")


class Attached(Protocol):
    """The WebSocket that a session is served over."""

    @property
    def transport(self) -> Any:
        """The connection's asyncio transport; None where it cannot be had."""

    def end(self, reason: SessionEnded) -> None:
        """Tell the client, and close."""


class Admission(Protocol):
    """Who waits for a slot, and for how long (`admission.py`)."""

    async def wait_for_room(self, has_room: Callable[[], bool]) -> None:
        """Return when there is room, or when it has been waited for long enough."""


class Hooks(Protocol):
    """Whoever wants to know of the sessions of a process: the shard that it is."""

    def new_id(self) -> str:
        """The id of the next session."""

    def on_change(self, count: int) -> None:
        """The number of sessions has changed, or a slot has become free."""

    def on_begin(self, session: Session, socket: Attached) -> None:
        """A WebSocket has a session from now on."""

    def on_end(self, session: Session) -> None:
        """It has not any more; called once for each `on_begin`."""


class NoHooks:
    """Nobody wants to know more than how many there are."""

    def __init__(self, on_change: Callable[[int], None] = lambda count: None) -> None:
        self._on_change = on_change

    def new_id(self) -> str:
        return str(uuid.uuid4())

    def on_change(self, count: int) -> None:
        self._on_change(count)

    def on_begin(self, session: Session, socket: Attached) -> None:
        pass

    def on_end(self, session: Session) -> None:
        pass


class Session:
    """One environment instance with its thread, from reservation to close."""

    def __init__(self, session_id: str, definition: Definition, thread: SessionThread) -> None:
        self.id = session_id
        self.definition = definition
        self.thread = thread
        self.env: Any = None
        self.calls: Calls | None = None  # None until the environment is ready
        self.socket: Attached | None = None
        self.close_when_detached = False
        self.busy = 0  # calls in progress; a busy session is never idle
        self.last_used = asyncio.get_running_loop().time()
        self._stack = AsyncExitStack()

    @property
    def ready_calls(self) -> Calls:
        """How to call its environment.

        Raises:
            UnknownSession: it is still being created.
        """
        if self.calls is None:
            raise UnknownSession(f"Session {self.id} is still initializing; retry shortly")
        return self.calls

    def create(self) -> asyncio.Future[None]:
        """A future of the environment having been created on the session's thread."""
        return self.thread.run(self._create)

    async def enter(self) -> None:
        """Hold the environment's MCP connection, if it has one, until the session ends."""
        calls = Calls(self.env)
        factory = getattr(self.env, "mcp_session", None)
        if callable(factory):
            await self._stack.enter_async_context(factory())
        self.calls = calls

    def touch(self) -> None:
        """Note that the session was used just now."""
        self.last_used = asyncio.get_running_loop().time()

    async def leave(self) -> asyncio.Future[None]:
        """Give up the MCP connection and queue the environment's `close`; a future of that."""
        with suppress(Exception):  # a broken connection must not keep the environment open
            await self._stack.aclose()
        return self.thread.run(self._close)

    async def call(self, method: Callable[..., Any], is_async: bool, *args: Any, **kw: Any) -> Any:
        """The result of one call, on the loop or on the session's thread."""
        return await self.begin(method, is_async, *args, **kw)

    def begin(
        self, method: Callable[..., Any], is_async: bool, *args: Any, **kwargs: Any
    ) -> asyncio.Future[Any]:
        """A future of one call, on the loop or on the session's thread."""
        if is_async:
            task: asyncio.Future[Any] = asyncio.ensure_future(method(*args, **kwargs))
            return task
        return self.thread.run(method, *args, **kwargs)

    def _create(self) -> None:
        try:
            self.env = self.definition.factory()
        except BaseException as exc:
            raise FactoryFailed(self.definition.factory_name, exc) from exc

    def _close(self) -> None:
        env, self.env = self.env, None
        close = getattr(env, "close", None)
        if close is None:
            return
        try:
            if inspect.iscoroutine(result := close()):
                asyncio.run(result)
        except Exception:
            log.warning("session %s: closing its environment failed", self.id, exc_info=True)


class SessionTable:
    """All sessions, and the room for more. On the event loop only."""

    def __init__(
        self,
        definition: Definition,
        max_sessions: int,
        *,
        exclusive: bool,
        hooks: Hooks | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.definition = definition
        self.max_sessions = max_sessions
        self._exclusive = exclusive
        self._hooks: Hooks = hooks or NoHooks()
        self._admission = admission
        self._sessions: dict[str, Session] = {}
        self._taken = 0
        self._closing = 0
        self._changed = asyncio.Event()  # a new one each time a slot or an environment is freed
        self._stopping: SessionEnded | None = None
        self._passing = asyncio.Semaphore(MAX_PASSING)
        self._shared = SessionThread("sessions") if definition.shares_one_thread else None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def taken(self) -> int:
        """How many slots are taken; one whose environment is closing may still take one."""
        return self._taken

    async def reserve(self, socket: Attached | None = None) -> Session:
        """A slot for a new session, whose environment is still to be created.

        Raises:
            CapacityReached, SessionEnded: there is no room, or we are stopping.
        """
        await self._wait_for_hand_over()
        if self._admission is not None:
            await self._admission.wait_for_room(lambda: self._taken < self.max_sessions)
        if self._stopping:
            raise self._stopping
        if self._taken >= self.max_sessions:
            raise CapacityReached(self._taken, self.max_sessions)
        self._taken += 1
        session = self._new()
        self._sessions[session.id] = session
        self._hooks.on_change(len(self._sessions))
        if socket is not None:
            self._join(session, socket)
        return session

    async def open(self) -> Session:
        """A new session, ready to be called."""
        session = await self.reserve()
        try:
            await session.create()
            await session.enter()
        except BaseException:
            await self.close(session)
            raise
        return session

    def find(self, session_id: str) -> Session:
        """The session of that id.

        Raises:
            UnknownSession: there is none.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"Unknown session_id: {session_id}")
        return session

    def attach(self, session_id: str, socket: Attached) -> Session:
        """Give an existing session to a WebSocket.

        Raises:
            UnknownSession: there is none, it is not ready, or it has a WebSocket already.
        """
        session = self.find(session_id)
        _ = session.ready_calls
        if session.socket is not None:
            raise UnknownSession(f"Session {session_id} already has an attached WebSocket")
        self._join(session, socket)
        session.touch()
        return session

    async def detach(self, session: Session) -> None:
        """Take an attached session back from its WebSocket."""
        self._part(session)
        if session.close_when_detached:
            await self.close(session)

    async def close(self, session: Session, *, abandoned: bool = False) -> None:
        """End a session. `abandoned`: a call of it is still running; do not wait for it."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._closing += 1
        if not self._exclusive:
            self._taken -= 1
        self._hooks.on_change(len(self._sessions))
        self._part(session)
        closed = await session.leave()
        closed.add_done_callback(lambda _: self._closed(session))
        if abandoned:
            log.warning("session %s ended while a call of it is still running", session.id)
        else:
            await asyncio.wait({closed}, timeout=CLOSE_SECONDS)

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[Session]:
        """A session outside the table, for one HTTP request: its own environment, then closed."""
        async with self._passing:
            session = self._new()
            try:
                await session.create()
                session.calls = Calls(session.env)
                yield session
            finally:
                await asyncio.wait({await session.leave()}, timeout=CLOSE_SECONDS)
                self._release_thread(session)

    async def stop(self, reason: SessionEnded) -> None:
        """Refuse new sessions and end all there are; returns when they are gone."""
        self._stopping = reason
        for session in self:
            if session.socket is not None:
                session.socket.end(reason)
            else:
                await self.close(session, abandoned=bool(session.busy))
        while self._sessions or self._closing:
            await self._changed.wait()

    def idle(self, now: float, limit_seconds: float) -> list[Session]:
        """The sessions that nothing has used for longer than the limit."""
        return [s for s in self if not s.busy and now - s.last_used > limit_seconds]

    def _join(self, session: Session, socket: Attached) -> None:
        session.socket = socket
        self._hooks.on_begin(session, socket)

    def _part(self, session: Session) -> None:
        if session.socket is not None:
            session.socket = None
            self._hooks.on_end(session)

    def _new(self) -> Session:
        session_id = self._hooks.new_id()
        thread = self._shared or SessionThread(f"session-{session_id[:8]}")
        return Session(session_id, self.definition, thread)

    def _closed(self, session: Session) -> None:
        self._closing -= 1
        self._release_thread(session)
        if self._exclusive:
            self._taken -= 1
            self._hooks.on_change(len(self._sessions))
        self._tell_change()

    def _release_thread(self, session: Session) -> None:
        if session.thread is not self._shared:
            session.thread.stop()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_hand_over(self) -> None:
        """Wait for a slot whose session has ended but whose environment is still closing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while self._taken >= self.max_sessions and self._exclusive and self._closing:
                    await self._changed.wait()
