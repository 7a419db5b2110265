# SPDX-License-Identifier: Apache-2.0
"""`SessionSocket`: one client on `/ws`, the hot path; no ASGI, and no task of its own.

    begin ──▶ slot ──▶ environment ──▶ │ READY ──frame──▶ CALLING ──outcome──▶ answer ─┐ │
                                       │   ▲      (further frames wait meanwhile)      │ │
                                       │   └───────────────────────────────────────────┘ │
    the client leaves, `close`, an error, a step that times out, `end` ──▶ `_finish`

`_call` is the call of the environment that is being waited for. `_finish` happens once: it frees
the slot first, since a client that sees the close must find room for its next session; then it
sends the last frame.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...system.net.websocket import INTERNAL_ERROR_CLOSE, NORMAL_CLOSE
from ...system.process import forking
from ...system.text.units import MB
from ..environment.instances import keep_accepted
from ..errors import NotReset, SessionEnded, SessionError, UnknownSession, WSErrorCode
from ..sessions.session import Session
from ..sessions.threads import plain_error
from ..websocket.frames import PartialMessages
from ..websocket.protocol import WebSocketProtocol
from . import messages

if TYPE_CHECKING:
    from ..sessions.table import SessionTable

# Of a client that does not wait for answers; a client with more is not read.
MAX_WAITING = 256  # messages
MAX_WAITING_BYTES = 4 * MB
LIST_TOOLS = "list_tools"  # the step that upstream allows before a reset

AnswerMcp = Callable[[Any, Session | None], Coroutine[Any, Any, dict[str, Any]]]

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class SessionService:
    """The objects that the sessions on WebSockets of one process share."""

    paths: frozenset[str]  # `/ws` and `/mcp`, unless the project serves them differently
    table: SessionTable
    answer_mcp: AnswerMcp
    loop: asyncio.AbstractEventLoop
    partial: PartialMessages = field(default_factory=PartialMessages)
    checks_handshakes: bool = False  # a session begins only if the project's middleware accepts it
    headers: bytes = b""  # lines of each handshake's answer: whose environment it is
    observation_message: Callable[[Any], bytes] = field(init=False)

    def __post_init__(self) -> None:
        writer = messages.ObservationWriter(self.table.definition.observation_form)
        object.__setattr__(self, "observation_message", writer.message)


@dataclass(eq=False, slots=True)
class Call:
    """A call that a session's socket waits for.

    The outcome is dropped when it is no longer waited for: the client left, the call timed out.
    """

    socket: SessionSocket
    name: str = ""  # of the message's type; empty while the session begins
    write: Callable[[Any], bytes] | None = None  # its answer; None while the session begins
    future: asyncio.Task[None] | None = None  # None: it runs on a thread
    timer: asyncio.TimerHandle | None = None
    session: Session | None = None  # of a call on a thread, which cannot be interrupted

    async def run(self, awaitable: Awaitable[Any]) -> None:
        """Await the call, and hand its outcome over: the body of a task.

        The outcome is handed over within the task: a callback of the task's would cost another
        iteration of the loop.
        """
        result: Any = None
        error: Exception | None = None
        forks = forking.forks
        try:
            result = await awaitable
            forking.end_copy(forks, None)
        except asyncio.CancelledError:
            if not self.socket.is_waiting_for(self):
                raise
            error = RuntimeError("the environment cancelled its own call")
        except BaseException as exc:
            forking.end_copy(forks, exc)
            error = plain_error(exc)
        self.settled(result, error)

    def settled(self, result: Any, error: BaseException | None) -> None:
        """Hand the outcome to the socket, if it still waits for it."""
        if self.session is not None:
            self.session.call_ended()
        if self.socket.is_waiting_for(self):
            try:
                self.socket.call_settled(self, result, error)
            except Exception as exc:
                self.socket.break_off(exc)
        elif error is not None:
            log.info("a call failed after its session had ended: %r", error)


class SessionSocket(WebSocketProtocol):
    """One session over one WebSocket: reset, step, state, mcp, close."""

    path = "/ws"
    _mcp_message = staticmethod(messages.mcp_message)

    def __init__(self, service: SessionService, connections: set[Any]) -> None:
        """Join uvicorn's `connections`, for which uvicorn waits when it stops."""
        super().__init__(service.loop, service.partial)
        self._service = service
        self._connections = connections
        connections.add(self)
        self._session: Session | None = None
        self._call: Call | None = None
        self._waiting: deque[bytes] | None = None
        self._is_full = False  # too much waits: the client is not read
        self._is_attached = False  # to a session that was begun over HTTP
        self._is_over = False

    def begin(self, wanted: str | None) -> None:
        """Attach to the session that the address names, or begin a new one."""
        try:
            if wanted and (session := self._find(wanted)) is not None:
                self._session, self._is_attached = session, True
                return
            session = self._session = self._service.table.take(self)
            if session is not None and session.begin_at_once():
                return
        except Exception as exc:
            self._fail(exc)
            return
        call = self._call = Call(self)
        call.future = self._loop.create_task(call.run(self._open(session)))

    def _find(self, wanted: str) -> Session | None:
        table = self._service.table
        try:
            return table.attach(wanted, self)
        except UnknownSession:
            if table.definition.refuses_unknown_ids:
                raise
        return None

    async def _open(self, session: Session | None) -> None:
        """Get a slot, where none was free at once, and an environment."""
        table = self._service.table
        if session is None:
            session = await table.reserve(self)
            if self._is_over:  # its client has just gone
                table.release(session)
                return
            self._session = session
        await session.begin()

    def text_received(self, payload: bytes) -> None:
        """Answer the message, or let it wait for its turn."""
        if self._is_over:
            return
        if self._call is None and not self.is_paused and not self._waiting:
            self._take(payload)
            return
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(payload)
        if not self._is_full and _is_too_much(self._waiting):
            self._is_full = True
            self.transport.pause_reading()

    def binary_received(self) -> None:
        """End the session, as upstream does."""
        self._fail(SessionError("Expected a text frame, got a binary one"))

    def resume_writing(self) -> None:
        """Go on: the client reads again."""
        super().resume_writing()
        self.guarded(self._go_on)

    def check_liveness(self) -> None:
        """Check whether the client lives, unless it is not read, so that no pong can be seen."""
        if self._is_full and self._call is not None:
            self._is_heard = True
        super().check_liveness()

    def _go_on(self) -> None:
        """Answer the messages that have waited."""
        waiting = self._waiting
        while waiting and self._call is None and not self.is_paused and not self._is_over:
            payload = waiting.popleft()
            if self._is_full and not _is_too_much(waiting):
                self._read_again()
            self._take(payload)

    def _read_again(self) -> None:
        self._is_full = False
        self._is_heard = True  # while it was not read, it could not be heard
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _take(self, payload: bytes) -> None:
        """Begin to answer one message."""
        kind: Any = None
        try:
            message = messages.decode(payload)
            kind = message.get("type", "")
        except UnicodeDecodeError:
            self.fail_text()
            return
        except AttributeError as exc:  # not an object: the session ends, as upstream's does
            self._fail(exc)
            return
        except Exception as exc:
            self.send_text(messages.error_frame(f"Invalid JSON: {exc}", WSErrorCode.INVALID_JSON))
            return
        try:
            self._dispatch(kind, message)
        except Exception as exc:
            self._refuse(kind, exc)

    def _dispatch(self, kind: Any, message: dict[str, Any]) -> None:
        match kind:
            case "step":
                self._step(messages.data_of(message))
            case "reset":
                self._reset(messages.data_of(message))
            case "state":
                messages.data_of(message)
                self._state()
            case "mcp":
                self._call_mcp(messages.data_of(message))
            case "branch" | "checkpoint" | "restore":
                self._branch(kind, messages.data_of(message))
            case "close":
                messages.data_of(message)
                self._finish(None, NORMAL_CLOSE)
            case _:
                text = f"Unknown message type: {kind}"
                self.send_text(messages.error_frame(text, WSErrorCode.UNKNOWN_TYPE))

    def _step(self, data: dict[str, Any]) -> None:
        session = self._ready()
        session.check_ready()
        if not session.may_step and data.get("type") != LIST_TOOLS:
            raise NotReset
        if session.is_remote:
            self._service.table.steps += 1
            self._ask("step", data)
            return
        calls, action = session.ready_calls, session.definition.parse_action(data)
        self._service.table.steps += 1
        write, is_async = self._service.observation_message, calls.signature.step_is_async
        self._start("step", write, calls.step, action, is_async=is_async)

    def _reset(self, data: dict[str, Any]) -> None:
        session = self._ready()
        session.may_step = True
        session.check_ready()
        if session.is_remote:
            self._ask("reset", data)
            return
        calls = session.ready_calls
        reset = calls.reset
        arguments = keep_accepted(reset, data)
        if arguments:
            reset = functools.partial(reset, **arguments)
        write, is_async = self._service.observation_message, calls.signature.reset_is_async
        self._start("reset", write, reset, is_async=is_async)

    def _state(self) -> None:
        session = self._ready()
        session.check_ready()
        if session.is_remote:
            self._ask("state", None)
            return
        calls = session.ready_calls
        if calls.signature.step_is_async:
            self.send_text(messages.state_message(calls.env.state))
        else:  # on the session's thread, as its step is
            self._start("state", messages.state_message, lambda: calls.env.state, is_async=False)

    def _ask(self, kind: str, data: Any) -> None:
        """Send a request to the session's process, which answers with a finished frame."""
        self._start(kind, bytes, kind, data, is_async=False)

    def _call_mcp(self, data: dict[str, Any]) -> None:
        session = self._ready()
        answer = self._service.answer_mcp
        self._start("mcp", self._mcp_message, answer, data, session, is_async=True)

    def _branch(self, kind: str, data: dict[str, Any]) -> None:
        answer = self._service.table.branches.answer
        self._start(kind, messages.branch_message, answer, self._ready(), kind, data, is_async=True)

    def _ready(self) -> Session:
        assert self._session is not None
        return self._session

    def is_waiting_for(self, call: Call) -> bool:
        """Return whether the outcome of `call` is still wanted."""
        return self._call is call

    def _start(
        self,
        name: str,
        write: Callable[[Any], bytes],
        method: Any,
        *args: Any,
        is_async: bool,
    ) -> None:
        """Start a call: in its own task if `is_async`, otherwise on a thread or in a process."""
        session = self._ready()
        awaitable: Any = method(*args) if is_async else None
        call = self._call = Call(self, name, write)
        session.busy += 1
        session.call_name, session.call_began = name, self._loop.time()
        limit = self._service.table.step_timeout_seconds
        if limit and name in ("step", "reset"):
            call.timer = self._loop.call_later(limit, self.guarded, self._time_out, call)
            self._service.table.count_limited(1)
        if is_async:
            call.future = self._loop.create_task(call.run(awaitable), context=session.context)
        else:
            call.session = session
            session.running += 1
            session.thread.submit(call.settled, method, *args)

    def _forget_call(self) -> Call | None:
        """Stop waiting for the call, and return it."""
        call, self._call = self._call, None
        if call is not None and call.name:
            session = self._ready()
            session.busy -= 1
            session.last_used = self._loop.time()
            if call.timer is not None:
                call.timer.cancel()
                self._service.table.count_limited(-1)
        return call

    def call_settled(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Send the outcome of the call, and continue."""
        self._forget_call()
        try:
            if error is not None:
                raise error
            if call.write is not None:
                frame = call.write(result)
                if call.write is self._service.observation_message or (
                    call.write is bytes and frame.startswith(messages.OBSERVATION)
                ):
                    self._service.table.branches.note_seen(self._ready(), frame)
                self.send_text(frame)
        except Exception as exc:
            if call.write is None:
                self._fail(exc)
            else:
                self._refuse(call.name, exc)
        self._go_on()

    def _refuse(self, kind: Any, exc: Exception) -> None:
        """Answer a message with an error; the session continues unless it is a `SessionError`."""
        if isinstance(exc, SessionError):
            self._fail(exc)
        else:
            env = None if self._session is None else self._session.env
            self.send_text(messages.refusal(kind, exc, self._log_fields(), env))

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the connection."""
        self._connections.discard(self)
        super().connection_lost(exc)

    def end(self, reason: SessionEnded) -> None:
        """Send the client the reason, and close."""
        self.guarded(self._fail, reason)

    def client_left(self) -> None:
        """Free the slot; nothing can be sent any more."""
        self._finish(None, NORMAL_CLOSE)

    def _time_out(self, call: Call) -> None:
        if self._call is not call:
            return
        limit, memory = self._service.table.time_out(self._ready(), call.name, call.future)
        text = f"The {call.name} did not finish within {limit}; the session has ended.{memory}"
        self._fail(SessionEnded(text, INTERNAL_ERROR_CLOSE))

    def _fail(self, exc: BaseException) -> None:
        if self._is_over:
            return
        if not isinstance(exc, SessionError):
            log.warning("a session ended with an error", exc_info=exc, extra=self._log_fields())
        code = exc.close_code if isinstance(exc, SessionEnded) else NORMAL_CLOSE
        self._finish(self._last_frame(exc), code)

    def _last_frame(self, exc: BaseException) -> bytes:
        if isinstance(exc, SessionError):
            return messages.error_frame(str(exc), exc.code, **exc.details)
        return messages.error_frame(messages.text_of(exc), WSErrorCode.SESSION_ERROR)

    def _log_fields(self) -> dict[str, str]:
        session = {} if self._session is None else {"session": self._session.id}
        return {**session, **super()._log_fields()}

    def _finish(self, last_frame: bytes | None, code: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._waiting = None
        if self._is_full:
            self._read_again()  # the close has to be seen
        ending = self._release(self._forget_call())
        if ending is None:
            self._close_with(last_frame, code)
        else:
            ending.add_done_callback(lambda _: self.guarded(self._close_with, last_frame, code))

    def _release(self, call: Call | None) -> asyncio.Future[None] | None:
        """Release the session; returns a future of its end, when that takes a while."""
        future = None if call is None else call.future
        if future is not None:
            self._loop.call_soon(future.cancel)  # later: a step that was received begins first
        if (session := self._session) is None:
            return future
        table = self._service.table
        if self._is_attached:
            return table.detach(session)
        if call is None:
            return table.release(session)
        if call.name and future is not None:
            return table.release(session, after=future)
        return table.release(session, abandoned=True)  # a thread cannot be interrupted

    def _close_with(self, last_frame: bytes | None, code: int) -> None:
        if last_frame is not None:
            self.send_text(last_frame)
        self.close(code)


def _is_too_much(waiting: deque[bytes]) -> bool:
    return len(waiting) >= MAX_WAITING or sum(map(len, waiting)) > MAX_WAITING_BYTES
