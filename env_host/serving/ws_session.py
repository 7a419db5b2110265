# SPDX-License-Identifier: Apache-2.0
"""One client on `/ws`: the hot path. No ASGI and no task of its own: frames and outcomes drive it.

    begin ──▶ slot ──▶ environment ──▶ │ READY ──frame──▶ CALLING ──outcome──▶ answer ─┐ │
                                       │   ▲      (what comes meanwhile waits)         │ │
                                       │   └───────────────────────────────────────────┘ │
    whatever ends it: the client leaves, `close`, an error, time is up, `end`  ──▶ `_finish`

`_call` is what is being waited for (`session_call.py`).
`_finish` happens once: it gives the slot up first, since a client that sees the close must find
room for its next session, and says the last word then.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ...system.units import MB
from ...system.websocket import INTERNAL_ERROR_CLOSE, NORMAL_CLOSE
from ..environment.signatures import keep_accepted
from ..errors import SessionEnded, SessionError, WSErrorCode
from ..sessions.pending_call import Call, Settle
from ..sessions.session import Session
from ..sessions.table import SessionTable
from ..websocket.protocol import WebSocketProtocol
from . import messages
from .mcp import Mcp
from .serialization import observation_data, state_data

# Of a client that does not wait for answers; with more, it is not read.
MOST_WAITING = 256  # messages
MOST_WAITING_BYTES = 4 * MB

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Service:
    """What all sessions of one process share."""

    table: SessionTable
    mcp: Mcp
    step_timeout_seconds: float | None
    loop: asyncio.AbstractEventLoop


class SessionSocket(WebSocketProtocol):
    """One session over one WebSocket: reset, step, state, mcp, close."""

    path = "/ws"

    __slots__ = (
        "_call",
        "_is_attached",
        "_is_full",
        "_is_over",
        "_service",
        "_session",
        "_waiting",
    )

    def __init__(self, service: Service) -> None:
        super().__init__(service.loop)
        self._service = service
        self._session: Session | None = None
        self._call: Call | None = None
        self._waiting: deque[bytes] | None = None
        self._is_full = False  # more than enough waits
        self._is_attached = False  # to a session that somebody else began
        self._is_over = False

    # Beginning

    def begin(self, wanted: str | None) -> None:
        """Attach to the session that the address names, or begin a new one."""
        table = self._service.table
        try:
            if wanted:
                self._session = table.attach(wanted, self)
                self._is_attached = True
            elif (session := table.take(self)) is not None:
                self._create(session)
            else:
                task = self._loop.create_task(table.reserve(self))
                self._wait_for(Call(self, self._reserved)).watch(task)
        except Exception as exc:
            self._fail(exc)

    def _reserved(self, session: Session, error: BaseException | None) -> None:
        self._call = None
        if error is not None:
            self._fail(error)
        else:
            self._create(session)

    def _create(self, session: Session) -> None:
        self._session = session
        creation = session.create()
        if creation is None:
            self._created(None, None)
        else:
            self._wait_for(Call(self, self._created)).watch(creation)

    def _created(self, _: Any, error: BaseException | None) -> None:
        self._call = None
        session = self._session
        assert session is not None
        if error is not None:
            self._fail(error)
        elif session.enter_at_once():
            self._go_on()
        else:
            entering = self._loop.create_task(session.enter())
            self._wait_for(Call(self, self._entered)).watch(entering)

    def _entered(self, _: Any, error: BaseException | None) -> None:
        self._call = None
        if error is not None:
            self._fail(error)
        else:
            self._go_on()

    # Conversing

    def text_received(self, payload: bytes) -> None:
        """Answer it, or let it wait for its turn."""
        if self._is_over:
            return
        if self._call is None and not self.is_paused and not self._waiting:
            self._take(payload)
            return
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(payload)
        if not self._is_full and _is_enough(self._waiting):
            self._is_full = True
            self.transport.pause_reading()

    def binary_received(self) -> None:
        """End the session, as upstream does."""
        self._fail(SessionError("Expected a text frame, got a binary one"))

    def resume_writing(self) -> None:
        """The client reads again: go on."""
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        """Answer what has waited."""
        waiting = self._waiting
        while waiting and self._call is None and not self.is_paused and not self._is_over:
            payload = waiting.popleft()
            if self._is_full and not _is_enough(waiting):
                self._is_full = False
                self.transport.resume_reading()
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        """Begin to answer one message."""
        kind: Any = None
        try:
            message = messages.decode(payload)
            kind = message.get("type", "")
        except json.JSONDecodeError as exc:
            self.send_text(messages.error_frame(f"Invalid JSON: {exc}", WSErrorCode.INVALID_JSON))
            return
        except UnicodeDecodeError:
            self.fail_text()
            return
        except AttributeError as exc:  # not an object: the session ends, as upstream's does
            self._fail(exc)
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
                self._speak_mcp(messages.data_of(message))
            case "close":
                messages.data_of(message)
                self._finish(None, NORMAL_CLOSE)
            case _:
                text = f"Unknown message type: {kind}"
                self.send_text(messages.error_frame(text, WSErrorCode.UNKNOWN_TYPE))

    def _step(self, data: dict[str, Any]) -> None:
        session = self._ready()
        calls = session.ready_calls
        action = session.definition.parse_action(data)
        self._service.table.counts.steps += 1
        if calls.step_is_async:
            self._begin("step", session.start(calls.step(action)), self._observed)
        else:
            self._submit("step", functools.partial(calls.step, action), self._observed)

    def _reset(self, data: dict[str, Any]) -> None:
        session = self._ready()
        calls = session.ready_calls
        reset = calls.reset
        arguments = keep_accepted(reset, data)
        if calls.reset_is_async:
            self._begin("reset", session.start(reset(**arguments)), self._observed)
        else:
            self._submit("reset", functools.partial(reset, **arguments), self._observed)

    def _state(self) -> None:
        session = self._ready()
        calls = session.ready_calls
        if calls.state_is_threaded:
            self._submit("state", lambda: calls.env.state, self._stated)
        else:
            self._say_state(calls.env.state)

    def _speak_mcp(self, data: dict[str, Any]) -> None:
        session = self._ready()
        task = self._loop.create_task(self._service.mcp.answer(data, session))
        self._begin("mcp", task, self._spoken)

    def _ready(self) -> Session:
        assert self._session is not None
        return self._session

    # Calling

    def is_waiting_for(self, call: Call) -> bool:
        """Whether the outcome of `call` is still wanted."""
        return self._call is call

    def give_back(self, session: Session) -> None:
        """End a session that has come too late."""
        self._service.table.release(session)

    def _wait_for(self, call: Call) -> Call:
        self._call = call
        return call

    def _begin(self, name: str, future: asyncio.Future[Any], settle: Settle) -> None:
        self._note(name, settle).watch(future)

    def _submit(self, name: str, call: Callable[[], Any], settle: Settle) -> None:
        self._ready().thread.submit(self._note(name, settle).settled, call)

    def _note(self, name: str, settle: Settle) -> Call:
        """Wait for a call of the environment, for as long as it may take."""
        call = self._wait_for(Call(self, settle, name))
        session = self._ready()
        session.busy += 1
        session.call_name, session.call_began = name, self._loop.time()
        limit = self._service.step_timeout_seconds
        if limit and name in ("step", "reset"):
            call.timer = self._loop.call_later(limit, self._time_out, call, name, limit)
        return call

    def _forget_call(self) -> Call | None:
        """Nothing is being waited for any more."""
        call, self._call = self._call, None
        if call is not None and call.name:
            session = self._ready()
            session.busy -= 1
            session.touch()
            if call.timer is not None:
                call.timer.cancel()
        return call

    def _observed(self, observation: Any, error: BaseException | None) -> None:
        self._answer(b'{"type":"observation","data":%b}', observation_data, observation, error)

    def _stated(self, state: Any, error: BaseException | None) -> None:
        self._answer(b'{"type":"state","data":%b}', state_data, state, error)

    def _say_state(self, state: Any) -> None:
        self.send_text(b'{"type":"state","data":%b}' % state_data(state))

    def _spoken(self, response: Any, error: BaseException | None) -> None:
        self._answer(b'{"type":"mcp","data":%b}', messages.encode, response, error)

    def _answer(
        self,
        frame: bytes,
        write: Callable[[Any], bytes],
        result: Any,
        error: BaseException | None,
    ) -> None:
        """Send what came of a call, and go on."""
        call = self._forget_call()
        try:
            if error is not None:
                raise error
            self.send_text(frame % write(result))
        except Exception as exc:
            self._refuse(call.name if call else "", exc)
        self._go_on()

    def _refuse(self, kind: Any, exc: Exception) -> None:
        """Say what is wrong with a message, or what came of it; the session goes on."""
        match exc:
            case SessionError():
                self._fail(exc)
            case ValidationError():
                self.send_text(messages.validation_frame(exc))
            case _:
                log.warning("%s failed", kind, exc_info=exc)
                self.send_text(messages.error_frame(str(exc), WSErrorCode.EXECUTION_ERROR))

    # Ending

    def end(self, reason: SessionEnded) -> None:
        """Tell the client, and close."""
        self._fail(reason)

    def client_left(self) -> None:
        """Give the slot up; nobody is left to tell."""
        self._finish(None, NORMAL_CLOSE)

    def _time_out(self, call: Call, name: str, limit: float) -> None:
        if self._call is not call:
            return
        self._service.table.counts.step_timeouts += 1
        log.warning("session %s: %s ran past %g s", self._ready().id, name, limit)
        text = f"The {name} did not finish within {limit:g} s; the session has ended."
        self._fail(SessionEnded(text, INTERNAL_ERROR_CLOSE))

    def _fail(self, exc: BaseException) -> None:
        """End the session with an error frame."""
        if self._is_over:
            return
        if isinstance(exc, SessionError):
            code = exc.close_code if isinstance(exc, SessionEnded) else NORMAL_CLOSE
            self._finish(messages.error_frame(str(exc), exc.code, **exc.details()), code)
            return
        log.warning("a session ended with an error", exc_info=exc)
        self._finish(messages.error_frame(str(exc), WSErrorCode.SESSION_ERROR), NORMAL_CLOSE)

    def _finish(self, last_word: bytes | None, code: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._waiting = None
        if self._is_full and not self.transport.is_closing():
            self.transport.resume_reading()  # the close has to be seen
        ending = self._let_go(self._forget_call())
        if ending is None:
            self._say_last(last_word, code)
        else:
            ending.add_done_callback(lambda _: self._say_last(last_word, code))

    def _let_go(self, call: Call | None) -> asyncio.Future[None] | None:
        """Give up what is held; a future of its end, when it takes a while."""
        future = None if call is None else call.future
        if isinstance(future, asyncio.Task):
            self._loop.call_soon(future.cancel)  # a step that has been asked for has been begun
        if (session := self._session) is None:
            return future if isinstance(future, asyncio.Task) else None
        table = self._service.table
        if self._is_attached:
            return table.detach(session)
        if call is None:
            return table.release(session)
        if isinstance(future, asyncio.Task):
            return table.release(session, after=future)
        return table.release(session, abandoned=True)  # a thread cannot be interrupted

    def _say_last(self, last_word: bytes | None, code: int) -> None:
        if last_word is not None:
            self.send_text(last_word)
        self.close(code)


def _is_enough(waiting: deque[bytes]) -> bool:
    return len(waiting) >= MOST_WAITING or sum(map(len, waiting)) > MOST_WAITING_BYTES
