# SPDX-License-Identifier: Apache-2.0
"""`SessionTable`: the sessions of one process, its slots, and how a session begins and ends.

The table is used on the event loop alone, so it needs no lock; every check and the reservation that
follows it happen without an await in between.

A slot is free again as soon as its session ends, even while a call that will not return still
holds the session's thread. The exception is a class that allows one session at a time: there the
slot stays taken until its environment is closed, and a new client waits a moment for that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ..environment.instances import Calls, Factory
from ..errors import BranchRefused, CallTimedOut, CapacityReached, SessionEnded, UnknownSession
from .branches import Branches
from .remote_session import RemoteSession
from .session import Session, Threads

if TYPE_CHECKING:
    from ..environment.definition import Definition
    from .remote_session import ProcessEnds
    from .session import Attached

CLOSE_SECONDS = 10.0  # how long a session's end waits for its environment's `close`
CLOSING_WAIT_SECONDS = 5.0  # how long a new client waits for a session that is closing already
SLOW_SECONDS = 10.0  # of a constructor whose client leaves: it counts as one that fails
MAX_ONE_SHOT = 1024  # sessions at once that serve one HTTP request each, mostly waiting

_T = TypeVar("_T")

log = logging.getLogger("openenvd.env_host")


class Admission(Protocol):
    """Decides who gets the next slot, and how long clients wait for one (`shard/admission.py`)."""

    def take_promise(self) -> bool:
        """Return whether the next session was promised a slot; the promise is used up."""

    async def wait_for_room(self, has_room: Callable[[], bool]) -> bool:
        """Wait for a slot; returns False when the wait has timed out."""

    @property
    def room(self) -> int:
        """The slots of this process that are neither taken nor promised."""

    @property
    def totals(self) -> tuple[int, int]:
        """The sessions and slots of all processes that serve this environment."""


class Registry(Protocol):
    """Receives the events of sessions (`shard/connections.py`)."""

    on_change: Callable[[], None]  # the number of sessions has changed, or a slot is free

    def new_id(self) -> str:
        """Make the id of the next session."""

    def on_begin(self, session: Session, socket: Attached) -> None:
        """Called when a WebSocket gets a session."""

    def on_end(self, session: Session) -> None:
        """Called once for each `on_begin`, when the WebSocket no longer has a session."""


class AbandonedCalls:
    """Calls that are still running on threads although their sessions have ended."""

    def __init__(self) -> None:
        # Called with the number of abandoned calls, and the time when the oldest of them began.
        self.on_change: Callable[[int, float], None] = lambda *_: None
        self._began: dict[Session, float] = {}

    def add(self, session: Session) -> None:
        """Count a session whose thread is still in a call, until the call returns."""
        if session.running and not session.is_remote and session not in self._began:
            session.on_ended = self._remove
            self._began[session] = session.call_began
            self._report()

    def _remove(self, session: Session) -> None:
        self._began.pop(session, None)
        self._report()

    def _report(self) -> None:
        self.on_change(len(self._began), min(self._began.values(), default=0.0))


@dataclass(eq=False)
class SessionTable:
    """All sessions, and the slots for more. On the event loop only."""

    definition: Definition
    max_sessions: int
    _: KW_ONLY
    exclusive: bool
    registry: Registry
    admission: Admission
    reset_first: bool | None = None
    step_timeout_seconds: float | None = None
    process_ends: ProcessEnds | None = None  # where each session has a process of its own
    idle_seconds: float = math.inf  # idle time after which a session ends
    unattached_seconds: float = math.inf  # the same, of one without a WebSocket
    taken: int = field(default=0, init=False)  # slots, also of environments that are closing
    _closing: int = field(default=0, init=False)
    _stopping: SessionEnded | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self.occupied = asyncio.Event()  # set while there is a session
        self.begun = self.steps = self.step_timeouts = 0  # since the start; time-outs of reset, too
        self._endings: set[asyncio.Task[None]] = set()  # the loop holds no reference to its tasks
        self._changed = asyncio.Event()  # a new one each time a slot or an environment is freed
        # Returns what else to say to the client of a call that began then and has timed out.
        self.memory_note: Callable[[float], str] = lambda _: ""
        # Called with 1 when a call with a time limit begins, with -1 when it ends.
        self.count_limited: Callable[[int], None] = lambda _: None
        self.abandoned = AbandonedCalls()
        self.branches = Branches(self)
        self._one_shot = asyncio.Semaphore(MAX_ONE_SHOT)
        self._threads = Threads(self.definition)
        self._factory = Factory(self.definition.factory, may_use_loop=self._threads.shared is None)
        server = self.definition.upstreams_server
        if server is not None and server._env_factory is self.definition.factory:  # noqa: SLF001
            server._env_factory = self._factory.create  # noqa: SLF001  so that failures are reported

    @property
    def failure(self) -> str | None:
        """Return why the last environment was not created; empty: it was, None: there was none."""
        return self._factory.failure

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def take(self, socket: Attached) -> Session | None:
        """Reserve a slot if that needs no waiting; otherwise None."""
        if self._stopping or self.taken >= self.max_sessions:
            return None
        if not self.admission.take_promise():
            return None
        return self._begin(socket)

    async def reserve(self, socket: Attached | None = None) -> Session:
        """Reserve a slot for a session; raises `CapacityReached`, or `SessionEnded` at a stop."""
        with suppress(TimeoutError):  # a slot may be of a session whose environment is closing
            async with asyncio.timeout(CLOSING_WAIT_SECONDS):
                while self.taken >= self.max_sessions and self.exclusive and self._closing:
                    await self._changed.wait()
        is_admitted = await self.admission.wait_for_room(lambda: self.taken < self.max_sessions)
        if self._stopping:
            raise self._stopping
        if not is_admitted:
            raise CapacityReached(*self.admission.totals)
        return self._begin(socket)

    async def open(self) -> Session:
        """Begin a session, ready to be called."""
        session = await self.reserve()
        try:
            await session.begin()
        except BaseException:
            await self.close(session)
            raise
        session.may_step = True  # its id is its client's: none returns to another unawares
        return session

    def begin_branches(self, count: int) -> list[Session]:
        """Take slots for branches, all or none; raises `BranchRefused`: there are too few."""
        if self._stopping or count > self.admission.room:
            taken, most = self.admission.totals
            refused = CapacityReached(taken, most)
            text = f"{count} branches do not fit here: {refused}"
            raise BranchRefused(text, refused.code, **refused.details)
        return [self._begin(None) for _ in range(count)]

    def find(self, session_id: str) -> Session:
        """Return the session of that id; raises `UnknownSession` when no session has this id."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"Unknown session_id: {session_id}")
        return session

    def attach(self, session_id: str, socket: Attached) -> Session:
        """Give an existing session to a WebSocket.

        Raises `UnknownSession`: none has this id, or it is not ready, or has a WebSocket already.
        """
        session = self.find(session_id)
        session.check_ready()
        if session.socket is not None:
            raise UnknownSession(f"Session {session_id} already has an attached WebSocket")
        self._attach(session, socket)
        session.cancel_expiry()
        session.touch()
        return session

    def detach(self, session: Session) -> asyncio.Future[None] | None:
        """Detach a session from its WebSocket; return a future of its end if this ends it."""
        self._detach(session)
        if session.close_when_detached:
            return self.release(session, abandoned=session.running > 0)
        session.touch()
        return None

    async def close(self, session: Session, *, abandoned: bool = False) -> None:
        """End a session and await its end, unless it is `abandoned`: a call of it still runs."""
        if (ending := self.release(session, abandoned=abandoned)) is not None:
            await ending

    def release(
        self, session: Session, *, after: asyncio.Future[Any] | None = None, abandoned: bool = False
    ) -> asyncio.Future[None] | None:
        """End a session; its slot is free at once, unless its class allows one session at a time.

        `after` is a call that is being cancelled, and ends first; `abandoned` means that a running
        call cannot be cancelled. Returns a future of the end, or None if it has ended already.
        """
        if self._sessions.pop(session.id, None) is None:
            return None
        self._closing += 1
        self.branches.session_ended(session)
        session.cancel_expiry()
        if not self._sessions:
            self.occupied.clear()
        if not self.exclusive:
            self.taken -= 1
        self.registry.on_change()
        self._detach(session)
        self.abandoned.add(session)
        if abandoned:
            call = "its creation" if not session.is_ready else f"its {session.call_name}"
            began = session.call_began or session.last_used
            seconds = asyncio.get_running_loop().time() - began
            if not session.is_ready and seconds >= SLOW_SECONDS:
                session.note_slow_creation()
            text = "session %s ended while %s was still running, after %.1f s"
            log.warning(text, session.id, call, seconds, extra={"session": session.id})
        if after is None and not abandoned and not session.needs_closing:
            self._closed(session)
            return None
        return self._finish_later(_end(session, after, self._closed, waits=not abandoned))

    async def one_shot(self, what: str, call: Callable[[Session], Coroutine[Any, Any, _T]]) -> _T:
        """Create an environment for one HTTP request, and call it; its session is not in the table.

        The call has a time limit, the creation has none. Raises `CallTimedOut`: as on a WebSocket,
        the call is cancelled or left running on its thread, and the environment is closed after it.
        """
        async with self._one_shot:
            session = self._new()
            calling = None
            try:
                await session.create()
                session.calls = Calls(session.env)
                calling = asyncio.get_running_loop().create_task(call(session))
                return await self._outcome_of(calling, session, what)
            finally:
                is_over = calling is None or calling.done()
                if calling is not None:
                    calling.cancel()
                ending = self._finish_later(_end(session, calling, Session.release_thread))
                if is_over:
                    await asyncio.wait({ending})

    async def within_limit(self, session: Session, what: str, call: Coroutine[Any, Any, _T]) -> _T:
        """Await a call to a session made over MCP, within the time limit.

        Raises `CallTimedOut`: the call took too long; the session ends, as on a WebSocket.
        """
        calling = asyncio.get_running_loop().create_task(call)
        try:
            return await self._outcome_of(calling, session, what)
        except CallTimedOut as exc:
            if session.socket is not None:
                session.socket.end(SessionEnded(str(exc), INTERNAL_ERROR_CLOSE))
            self.release(session, after=calling)  # where it has not ended with its WebSocket
            raise
        finally:
            calling.cancel()

    async def stop(self, reason: SessionEnded) -> None:
        """Refuse new sessions and end all others; returns when no session is left."""
        self._stopping = reason
        for session in self:
            if session.socket is not None:
                session.socket.end(reason)
            else:
                await self.close(session, abandoned=bool(session.busy))
        while self._sessions or self._closing:
            await self._changed.wait()

    async def _outcome_of(self, calling: asyncio.Task[_T], session: Session, what: str) -> _T:
        """Wait for a call up to the time limit; past it, raise without cancelling the call."""
        self.count_limited(1)
        calling.add_done_callback(lambda _: self.count_limited(-1))
        await asyncio.wait({calling}, timeout=self.step_timeout_seconds)
        if not calling.done():
            self.abandoned.add(session)
            raise CallTimedOut(what, *self.time_out(session, what, calling))
        if calling.cancelled():
            raise RuntimeError("the environment cancelled its own call")
        return calling.result()

    def time_out(
        self, session: Session, what: str, task: asyncio.Task[Any] | None
    ) -> tuple[str, str]:
        """Count and log a call that timed out; return its limit, with its line, and a note."""
        limit = self.step_timeout_seconds
        assert limit is not None
        self.step_timeouts += 1
        text, extra = "session %s: %s timed out after %g s%s", {"session": session.id}
        log.warning(text, session.id, what, limit, place := session.place(task), extra=extra)
        return f"{limit:g} s{place}", self.memory_note(session.call_began)

    def _finish_later(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    def _attach(self, session: Session, socket: Attached) -> None:
        session.socket = socket
        self.registry.on_begin(session, socket)

    def _detach(self, session: Session) -> None:
        if session.socket is not None:
            session.socket = None
            self.registry.on_end(session)

    def _new(self, ends: ProcessEnds | None = None) -> Session:
        made = self.registry.new_id(), self.definition, self._factory, self._threads
        session: Session
        session = Session(*made) if ends is None else RemoteSession(ends, self.release, *made)
        session.may_step = None if self.reset_first is None else not self.reset_first
        return session

    def _begin(self, socket: Attached | None) -> Session:
        self.taken += 1
        self.begun += 1
        session = self._new(self.process_ends)
        self._sessions[session.id] = session
        self.occupied.set()
        self.registry.on_change()
        if socket is not None:
            self._attach(session, socket)
        return session

    def _closed(self, session: Session) -> None:
        self._closing -= 1
        session.release_thread()
        if self.exclusive:
            self.taken -= 1
            self.registry.on_change()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _end(
    session: Session,
    after: asyncio.Future[Any] | None,
    on_closed: Callable[[Session], None],
    *,
    waits: bool = True,
) -> None:
    """Close a session's environment after its call. If either hangs, no other session waits."""
    if after is not None:
        await asyncio.wait({after}, timeout=CLOSE_SECONDS)
    closed = await session.leave()
    closed.add_done_callback(lambda _: on_closed(session))
    if waits:
        await asyncio.wait({closed}, timeout=CLOSE_SECONDS)
