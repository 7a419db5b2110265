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
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..environment.instances import Calls, Factory
from ..errors import CapacityReached, SessionEnded, UnknownSession
from .session import Attached, Session, Threads

if TYPE_CHECKING:
    from ..environment.definition import Definition

__all__ = ["Admission", "Attached", "Hooks", "NoHooks", "Session", "SessionTable"]

CLOSE_SECONDS = 10.0  # how long a session's end waits for its environment's `close`
HAND_OVER_SECONDS = 5.0  # how long a newcomer waits for a session that is closing already
MAX_ONE_SHOT = 1024  # sessions at once that serve one HTTP request each, mostly waiting

log = logging.getLogger("openenvd.env_host")


class Admission(Protocol):
    """Who waits for a slot, and for how long (`admission.py`)."""

    def take_promise(self) -> bool:
        """Whether the next session was promised a slot; it is taken at once then."""

    async def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Return True when there is room, False when it has been waited for long enough."""

    @property
    def totals(self) -> tuple[int, int]:
        """Sessions and slots, of all processes that serve this environment."""


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


@dataclass(slots=True)
class Counts:
    """What has happened in this process, ever."""

    begun: int = 0  # sessions
    steps: int = 0
    step_timeouts: int = 0  # of reset, too


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
        self.counts = Counts()
        self._taken = 0
        self._closing = 0
        self._endings: set[asyncio.Task[None]] = set()  # a loop keeps no hold of its tasks
        self._changed = asyncio.Event()  # a new one each time a slot or an environment is freed
        self._stopping: SessionEnded | None = None
        self._one_shot = asyncio.Semaphore(MAX_ONE_SHOT)
        self._threads = Threads(definition)
        self._factory = Factory(definition.factory, may_use_loop=self._threads.shared is None)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def taken(self) -> int:
        """How many slots are taken; one whose environment is closing may still take one."""
        return self._taken

    def take(self, socket: Attached) -> Session | None:
        """What `reserve` gives, when nobody has to be asked or waited for; otherwise None."""
        if self._stopping or self._taken >= self.max_sessions:
            return None
        if self._admission is not None and not self._admission.take_promise():
            return None
        return self._begin(socket)

    async def reserve(self, socket: Attached | None = None) -> Session:
        """A slot for a new session, whose environment is still to be created.

        Raises:
            CapacityReached, SessionEnded: there is no room, or we are stopping.
        """
        await self._wait_for_hand_over()
        let_in = self._admission is None or await self._admission.wait_for_room(self._has_room)
        if self._stopping:
            raise self._stopping
        if self._admission is not None and not let_in:
            raise CapacityReached(*self._admission.totals)
        if self._taken >= self.max_sessions:
            raise CapacityReached(self._taken, self.max_sessions)
        return self._begin(socket)

    async def open(self) -> Session:
        """A new session, ready to be called."""
        session = await self.reserve()
        try:
            if (creation := session.create()) is not None:
                await creation
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

    def detach(self, session: Session) -> asyncio.Future[None] | None:
        """Take an attached session back from its WebSocket; a future of its end, if it ends so."""
        self._part(session)
        return self.release(session) if session.close_when_detached else None

    async def close(self, session: Session, *, abandoned: bool = False) -> None:
        """End a session and wait for it. `abandoned`: a call of it is still running; do not."""
        if (ending := self.release(session, abandoned=abandoned)) is not None:
            await ending

    def release(
        self,
        session: Session,
        *,
        after: asyncio.Future[None] | None = None,
        abandoned: bool = False,
    ) -> asyncio.Future[None] | None:
        """End a session: None when that is done, otherwise a future of it. Its slot is free at
        once, save of a class for one session at a time.

        Args:
            after: a call that is being cancelled, and comes to its end first.
            abandoned: a call that cannot be cancelled is still running; do not wait for it.
        """
        if self._sessions.pop(session.id, None) is None:
            return None
        self._closing += 1
        if not self._exclusive:
            self._taken -= 1
        self._hooks.on_change(len(self._sessions))
        self._part(session)
        if abandoned:
            self._warn_of_abandoned(session)
        if after is None and not abandoned and not session.needs_closing:
            self._closed(session)
            return None
        task = asyncio.get_running_loop().create_task(self._end(session, after, abandoned))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    @asynccontextmanager
    async def one_shot_session(self) -> AsyncIterator[Session]:
        """A session outside the table, for one HTTP request: its own environment, then closed."""
        async with self._one_shot:
            session = self._new()
            try:
                if (creation := session.create()) is not None:
                    await creation
                session.calls = Calls(session.env)
                yield session
            finally:
                await asyncio.wait({await session.leave()}, timeout=CLOSE_SECONDS)
                session.release_thread()

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

    def _has_room(self) -> bool:
        return self._taken < self.max_sessions

    def _join(self, session: Session, socket: Attached) -> None:
        session.socket = socket
        self._hooks.on_begin(session, socket)

    def _part(self, session: Session) -> None:
        if session.socket is not None:
            session.socket = None
            self._hooks.on_end(session)

    def _new(self) -> Session:
        return Session(self._hooks.new_id(), self.definition, self._factory, self._threads)

    def _begin(self, socket: Attached | None) -> Session:
        self._taken += 1
        self.counts.begun += 1
        session = self._new()
        self._sessions[session.id] = session
        self._hooks.on_change(len(self._sessions))
        if socket is not None:
            self._join(session, socket)
        return session

    async def _end(
        self, session: Session, after: asyncio.Future[None] | None, abandoned: bool
    ) -> None:
        if after is not None:
            await asyncio.wait({after}, timeout=CLOSE_SECONDS)
        closed = await session.leave()
        closed.add_done_callback(lambda _: self._closed(session))
        if not abandoned:
            await asyncio.wait({closed}, timeout=CLOSE_SECONDS)

    def _closed(self, session: Session) -> None:
        self._closing -= 1
        session.release_thread()
        if self._exclusive:
            self._taken -= 1
            self._hooks.on_change(len(self._sessions))
        self._tell_change()

    def _warn_of_abandoned(self, session: Session) -> None:
        what, seconds = "its creation", session.age
        if session.calls is not None:
            what = f"its {session.call_name}"
            seconds = asyncio.get_running_loop().time() - session.call_began
        text = "session %s ended while %s still runs, since %.1f s"
        log.warning(text, session.id, what, seconds)

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_hand_over(self) -> None:
        """Wait for a slot whose session has ended but whose environment is still closing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while self._taken >= self.max_sessions and self._exclusive and self._closing:
                    await self._changed.wait()
