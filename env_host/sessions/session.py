# SPDX-License-Identifier: Apache-2.0
"""`Session`: one environment instance, from its slot's reservation to its close; `SessionWatch`.

    begin ──▶ calls, one at a time ──▶ leave

Environments are created where `Factory` decides; synchronous calls run on threads (`threads.py`),
asynchronous ones on the loop, all in the session's own context, as in upstream's task per session.

`SessionWatch` looks for silent clients, calls that hang, and idleness: one task for all sessions of
a process, since a timer for each would cost more than a waiting session does; it sleeps while there
is no session. It pings a client that has sent nothing for a round, and closes the connection of one
that has not answered by the next. It logs a call that lasts very long, again each time the call has
lasted twice as long. It ends sessions that nothing has used for a limited time; those that were
begun over HTTP and forgotten have a limit of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from ...system.net.websocket import GOING_AWAY_CLOSE
from ...system.process import forking
from ...system.text.units import plural
from ..environment.instances import Calls, shown_place, stack_of
from ..errors import FactoryFailed, SessionEnded, UnknownSession
from .threads import CallSharing, SessionThread, SharingRunner, plain_error

if TYPE_CHECKING:
    from ..environment.definition import Definition
    from ..environment.instances import Factory
    from .table import SessionTable

log = logging.getLogger("openenvd.env_host")


class Attached(Protocol):
    """The WebSocket that a session is served over."""

    path: str  # of its address: `/ws` or `/mcp`
    transport: Any  # the connection's asyncio transport

    def check_liveness(self) -> None:
        """Ping a client that has been silent; close if it has not answered the last ping."""

    def end(self, reason: SessionEnded) -> None:
        """Send the reason to the client, and close."""


class Threads:
    """The threads that the sessions of one process run on."""

    def __init__(self, definition: Definition) -> None:
        self.shared = SessionThread() if definition.shares_one_thread else None  # by all sessions
        self._sharing = CallSharing() if definition.may_change_threads else None

    def for_session(self) -> SessionThread:
        """Return what the calls of one session run on."""
        return SessionThread() if self._sharing is None else SharingRunner(self._sharing)


class Session:
    """One environment instance with what it runs on."""

    is_remote = False  # its environment is in another process (`remote_session.py`)

    def __init__(
        self, session_id: str, definition: Definition, factory: Factory, threads: Threads
    ) -> None:
        self.id = session_id
        self.definition = definition
        self.env: Any = None
        self.calls: Calls | None = None  # None until the environment is ready
        self.socket: Attached | None = None
        self.close_when_detached = False
        self.may_step: bool | None = None  # None: as its environment's class says
        self.seen = b""  # the message of the last observation
        self.is_branch = False
        self.expiry: asyncio.TimerHandle | None = None  # of a branch without a client
        self.busy = 0  # calls in progress; a busy session is never idle
        self.call_name = ""  # of the last one over its WebSocket, and when it began
        self.call_began = 0.0
        self.running = 0  # calls that threads run, abandoned ones included
        self.on_ended: Callable[[Session], None] | None = None  # the last of these has returned
        self.last_used = asyncio.get_running_loop().time()
        self._factory = factory
        self._threads = threads
        self._thread = threads.shared
        self._holding: HeldContext | None = None
        self._context: contextvars.Context | None = None

    @property
    def is_ready(self) -> bool:
        """Return whether the environment can be called."""
        return self.calls is not None

    def check_ready(self) -> None:
        """Raise `UnknownSession` while the environment is being created."""
        if not self.is_ready:
            raise UnknownSession(f"Session {self.id} is still initializing; retry shortly")

    @property
    def ready_calls(self) -> Calls:
        """Return how to call the environment; raises `UnknownSession` while it is being created."""
        self.check_ready()
        assert self.calls is not None
        return self.calls

    @property
    def context(self) -> contextvars.Context:
        """The context that the session's asynchronous calls share."""
        if self._context is None:
            self._context = contextvars.copy_context()
        return self._context

    @property
    def thread(self) -> SessionThread:
        """Return where the session's synchronous calls run."""
        if self._thread is None:
            self._thread = self._threads.for_session()
        return self._thread

    @property
    def needs_closing(self) -> bool:
        """Return whether there is anything to do at the session's end."""
        calls = self.calls
        return calls is None or self._holding is not None or calls.signature.closes

    def create_at_once(self) -> bool:
        """Create the environment here, where that is quick; False: `create` is to do it."""
        if self.env is None and self._thread is None:
            self.env = self._factory.create_on_loop()
        return self.env is not None

    async def create(self) -> None:
        """Create the environment; raises `FactoryFailed` when it cannot be."""
        if not self.create_at_once():
            await self.call(self._create, is_async=False)

    def begin_at_once(self) -> bool:
        """Prepare the session if that needs no waiting; otherwise `begin` prepares it."""
        if not self.create_at_once() or (calls := Calls(self.env)).signature.holds_mcp:
            return False
        self._set_ready(calls)
        return True

    async def begin(self) -> None:
        """Create the environment, and hold its MCP connection, if any, until the session ends."""
        await self.create()
        calls = Calls(self.env)
        if calls.signature.holds_mcp:
            self._holding = HeldContext(self.env.mcp_session)
            await self._holding.begin()
        self._set_ready(calls)

    def note_slow_creation(self) -> None:
        """Report that environments cannot be created, since the constructor does not return."""
        self._factory.note_slow(asyncio.get_running_loop().time() - self.call_began)

    def touch(self) -> None:
        """Record that the session was used just now."""
        self.last_used = asyncio.get_running_loop().time()

    async def leave(self) -> asyncio.Future[None]:
        """Close the MCP connection and queue the environment's `close`; a future of that."""
        if self._holding is not None:
            await self._holding.end()
        return self.thread.run(self._close)

    async def replace(self, env: Any) -> None:
        """Continue with another instance; the one before, if any, is closed."""
        if self.is_ready and self.needs_closing:
            await (await self.leave())
        self._holding, self.env = None, env
        await self.begin()

    def cancel_expiry(self) -> None:
        """Remove the time limit of a branch, because its client has connected or it has ended."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    def release_thread(self) -> None:
        """Stop the session's own thread, if it has one."""
        if self._thread is not None and self._thread is not self._threads.shared:
            self._thread.stop()

    async def call(self, method: Callable[..., Any], is_async: bool, *args: Any) -> Any:
        """Make one call, on the loop or on the session's thread, and return its result."""
        if is_async:
            calling = _plainly(method(*args))
            return await asyncio.get_running_loop().create_task(calling, context=self.context)
        self.call_began = asyncio.get_running_loop().time()
        self.running += 1
        return await self.thread.run(method, *args, on_return=self.call_ended)

    def place(self, task: asyncio.Task[Any] | None) -> str:
        """Return the line that a call runs, in brackets, or ''; `task`: of an async call."""
        stack = [] if self._thread is None else stack_of(self._thread.ident)
        coroutine: Any = None if task is None else task.get_coro()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            stack.append((frame, frame.f_lineno))
            coroutine = coroutine.cr_await
        return shown_place(stack)

    def call_ended(self) -> None:
        """Record that a thread has returned from a call."""
        self.running -= 1
        if not self.running and self.on_ended is not None:
            self.on_ended(self)

    def _set_ready(self, calls: Calls) -> None:
        self.calls = calls
        if self.may_step is None:
            self.may_step = not getattr(type(self.env), "RESET_FIRST", True)
        if calls.signature.is_async and self._thread is not self._threads.shared:
            self.release_thread()
            self._thread = None

    def _create(self) -> None:
        try:
            self.env = self._factory.create()
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
            text, extra = "session %s: closing its environment failed", {"session": self.id}
            log.warning(text, self.id, exc_info=True, extra=extra)


async def _plainly(call: Awaitable[Any]) -> Any:
    """Await a call in a task of its own: `sys.exit()` there would end the process."""
    forks = forking.forks
    try:
        result = await call
    except asyncio.CancelledError:
        raise
    except BaseException as exc:
        forking.end_copy(forks, exc)
        raise plain_error(exc) from exc.__cause__
    forking.end_copy(forks, None)
    return result


class HeldContext:
    """Keeps a context manager open in one task from begin to end, as cancel scopes demand."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        self._factory = factory
        self._entered: asyncio.Future[None] = loop.create_future()
        self._released = asyncio.Event()
        self._task = loop.create_task(self._hold())

    async def begin(self) -> None:
        """Wait until the context is open; raises `Exception` when the context cannot be opened."""
        try:
            await asyncio.wait({self._entered, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Close the context, and wait for that."""
        self._released.set()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.info("an MCP connection did not close: %r", error)

    async def _hold(self) -> None:
        async with self._factory():
            self._entered.set_result(None)
            await self._released.wait()


ROUND_SECONDS = 20.0  # uvicorn's `ws_ping_interval`
POLL_INTERVAL_SECONDS = 5.0
HUNG_SECONDS = 60.0
SESSIONS_AT_ONCE = 500  # before other tasks have their turn
MIN_IDLE_POLL_INTERVAL_SECONDS = 1.0


class SessionWatch:
    """Pings silent clients, logs hung calls, ends idle sessions. On the event loop only."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        limit = min(table.idle_seconds, table.unattached_seconds)
        idle_look_seconds = max(limit / 4, MIN_IDLE_POLL_INTERVAL_SECONDS)
        self._look_seconds = min(POLL_INTERVAL_SECONDS, idle_look_seconds)
        self._next_log: dict[str, float] = {}  # by session: how long its call lasts by then

    async def run(self) -> None:
        """Look at all sessions again and again while there are any; never returns."""
        loop = asyncio.get_running_loop()
        next_round = 0.0
        while True:
            if not self._table.occupied.is_set():
                await self._table.occupied.wait()
                next_round = loop.time() + ROUND_SECONDS
            await asyncio.sleep(self._look_seconds)
            is_round = loop.time() >= next_round
            if is_round:
                next_round = loop.time() + ROUND_SECONDS
            await self._look(is_round=is_round)

    async def _look(self, *, is_round: bool) -> None:
        loop = asyncio.get_running_loop()
        sessions = list(self._table)
        self._next_log = {each.id: self._next_log.get(each.id, 0.0) for each in sessions}
        creating = [each for each in sessions if not each.is_ready and each.running]
        first = min(creating, key=lambda each: each.call_began, default=None)
        if first is not None and loop.time() - first.call_began >= HUNG_SECONDS:
            first.note_slow_creation()  # not of each: it looks at the frames of all threads
        forgotten = 0
        for number, session in enumerate(sessions, 1):
            self._log_hung(session, loop.time())
            if is_round and session.socket is not None:
                session.socket.check_liveness()
            forgotten += self._end_idle(session, loop.time())
            if number % SESSIONS_AT_ONCE == 0:
                await asyncio.sleep(0)
        if forgotten:
            text = "%s without a WebSocket ended: unused for %g s"
            log.warning(text, plural(forgotten, "session"), self._table.unattached_seconds)

    def _log_hung(self, session: Session, now: float) -> None:
        seconds = now - session.call_began
        if not session.busy or not session.call_name or seconds < HUNG_SECONDS:
            self._next_log[session.id] = 0.0
        elif seconds >= self._next_log[session.id]:
            self._next_log[session.id] = seconds * 2
            text = "session %s: %s has not returned for %.0f s"
            extra = {"session": session.id}
            log.warning(text, session.id, session.call_name, seconds, extra=extra)

    def _end_idle(self, session: Session, now: float) -> bool:
        """End a session that was idle for too long; True: it was begun over HTTP and forgotten."""
        seconds, limit = 0.0 if session.busy else now - session.last_used, self._table.idle_seconds
        if session.socket is None:
            # Not while its environment is being created.
            is_forgotten = seconds > self._table.unattached_seconds and session.is_ready
            if is_forgotten or seconds > limit:
                self._table.release(session)
            return is_forgotten
        if seconds > limit:
            text = f"The session was idle for more than {limit:g} s."
            session.socket.end(SessionEnded(text, GOING_AWAY_CLOSE))
        return False
