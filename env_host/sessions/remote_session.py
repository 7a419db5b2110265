# SPDX-License-Identifier: Apache-2.0
"""`RemoteSession`: a session whose environment runs in a process of its own, as the shard sees it.

    `SessionSocket` ─▶ `RemoteSession` ─▶ `ProcessEnd` ══ socket pair ══ session process
                 ◀── the finished frame, as it is ◀──┘                 (`shard/session_process.py`)
    `ProcessEnds`, all of one shard
        ── link: start a process, copies will be made, kill a process ──▶ supervisor
        ◀── link: memory cgroups for copies, how a process has ended ──

The shard keeps the connection, framing, limits and time-outs. It parses no action, and loads no
pickles from the environment's process. A process runs one call at a time. What happens when

    the process ends            its call fails, and the session ends with the supervisor's
                                explanation, or without it after `REASON_SECONDS`
    no process can be started   the session's client gets an error
    the session ends            the environment is closed after the current call. Its process is
                                killed if that takes longer than `PATIENCE_SECONDS`
    the shard exits             the supervisor kills its session processes
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import marshal
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ...system.process.descriptors import MAX_FDS, Message, close_all
from ...system.process.proc import kill
from ...system.text.json_lines import Json
from ..errors import BranchRefused, FactoryFailed, SessionEnded, SessionError, WSErrorCode
from ..startup import stacks_signal
from .copying import Reason, unsupported
from .session import Session
from .threads import Settle

if TYPE_CHECKING:
    from ..ipc.fd_messages import MessageChannel

HEAD = struct.Struct("!QB")  # of a message: its length, and what it is
# For the client; in `marshal`'s form, for the shard; why the session is to end.
FRAME, VALUE, LOST = 0, 1, 2
MAX_COPIES = MAX_FDS  # made by one fork
REASON_SECONDS = 5.0
PATIENCE_SECONDS = 10.0  # for a call and `close`, once the session has ended
FORK_SECONDS = 30.0  # for the template to fork
SPARES = 2  # forks of the template that wait for the next sessions
STACKS_SECONDS = 0.1  # for the stacks of a process to be written before it is killed

log = logging.getLogger("openenvd.env_host")


class ProcessEnd(asyncio.Protocol):
    """The shard's end of one session process. On the event loop only."""

    def __init__(self, ends: ProcessEnds, end: socket.socket, number: int = 0) -> None:
        self.pid = 0  # until the process has begun
        self.number = number  # of the request to start it; 0: a copy
        self.on_lost: Callable[[SessionEnded], None] = lambda _: None
        self._ends = ends
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._unread = bytearray()
        self._calls: deque[tuple[Settle, bytes, tuple[int, ...]]] = deque()  # the first is running
        self._lost: SessionEnded | None = None
        self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def open(self, pid: int = 0) -> ProcessEnd:
        """Wait until the process has begun. Give the `pid` of a copy, which has begun already.

        Raises `SessionEnded`: it could not begin, or has ended.
        """
        try:
            await self._loop.create_unix_connection(lambda: self, sock=self._end)
            if pid:
                self._begin(pid)
            await self.begun
        except asyncio.CancelledError:
            self.discard()
            raise
        return self

    def submit(self, settle: Settle, kind: str, data: Any = None, *fds: int) -> None:
        """Send a request with descriptors; `settle(answer, error)` is called with the answer."""
        if self._lost is not None:
            close_all(fds)
            self._loop.call_soon(settle, None, self._lost)
            return
        self._calls.append((settle, marshal.dumps((kind, data)), fds))
        if len(self._calls) == 1:
            self._send_first()

    @property
    def is_lost(self) -> bool:
        """Return whether the process has ended, even if the reason is not known yet."""
        return self.ended.done() or (self._transport is not None and self._transport.is_closing())

    async def ask(self, kind: str, data: Any = None, *fds: int) -> Any:
        """Send a request and return the answer; raises `SessionEnded` if the process has ended."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(result)

        self.submit(settle, kind, data, *fds)
        return await answer

    async def copies(self, count: int, *, is_new: bool = False) -> list[ProcessEnd]:
        """Fork all copies or none; copies that are `is_new` are for new sessions, not branches.

        Raises `BranchRefused`: something forbids that; `SessionEnded`: the process has ended.
        """
        made: list[ProcessEnd] = []
        try:
            while len(made) < count:
                size = min(count - len(made), MAX_COPIES)
                made += await self._fork(size, is_new=is_new)
        except BaseException:
            for each in made:
                each.discard()
            raise
        return made

    async def _fork(self, count: int, *, is_new: bool) -> list[ProcessEnd]:
        number, groups = await self._ends.announce_copies(count)
        made = []
        pids: list[int] = []
        try:
            try:
                pairs = [socket.socketpair() for _ in range(count)]
            except OSError as exc:
                text = f"{count} copies do not fit here: {exc.strerror}"
                raise BranchRefused(text, WSErrorCode.BRANCH_MEMORY) from exc
            made = [ProcessEnd(self._ends, ours) for ours, _ in pairs]
            request = {"groups": groups, "is_new": is_new}
            found = await self.ask("fork", request, *(theirs.detach() for _, theirs in pairs))
            pids = found["pids"]
            if "text" in found:
                raise BranchRefused(f"For a copy, {found['text']}", WSErrorCode.BRANCH_MEMORY)
            if obstacles := found["obstacles"]:
                reason = obstacles[0][0]
                raise unsupported(
                    Reason(reason), [name for each, name in obstacles if each == reason]
                )
            for each, pid in zip(made, pids, strict=True):
                await each.open(pid)
        except BaseException:
            for each in made:
                each.discard()
            raise
        finally:
            self._ends.register_copies(number, pids)
        return made

    def close(self) -> asyncio.Future[None]:
        """Close the environment after the current call; the future ends when the process does."""
        if not (self._is_closing or self.ended.done()):
            self._is_closing = True
            self._timer = self._loop.call_later(PATIENCE_SECONDS, self._end_late)
            if self._transport is None:  # cancelled while it was being opened
                self.discard()
            else:
                self._transport.write(_message(marshal.dumps(("close", None))))
        return asyncio.shield(self.ended)

    def discard(self) -> None:
        """End an unused copy without closing its environment."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()
        else:
            self._end.close()
            self.fail("The process of this session was not started.")

    def _end_late(self) -> None:
        """Log the stacks of the process, then have it killed: a call or `close` takes too long."""
        text = "process %d is killed: its session ended, and a call or `close` has not returned"
        log.warning(text, self.pid)
        self.write_stacks()
        self._timer = self._loop.call_later(STACKS_SECONDS, self._ends.report, "end", self)

    def write_stacks(self) -> None:
        """Make the process write its stacks to the log, by a signal."""
        if self.pid and not self.is_lost and (number := stacks_signal()):
            kill(self.pid, number)

    def fail(self, text: str) -> None:
        """Record that the process has ended; `text` tells the client how."""
        if self.ended.done():
            return
        self._ends.forget(self)
        if self._transport is not None:
            self._transport.abort()
        self._lost = SessionEnded(text, INTERNAL_ERROR_CLOSE)
        self.ended.set_result(None)
        if not self.begun.done():
            self.begun.set_exception(self._lost)
            self.begun.exception()  # its session may have ended before it began
        while self._calls:
            settle, _, fds = self._calls.popleft()
            close_all(fds)
            settle(None, self._lost)
        self.on_lost(self._lost)

    # The socket pair

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle each complete answer, and keep the rest until more is received."""
        unread = self._unread
        unread += data
        while len(unread) >= HEAD.size:
            length, kind = HEAD.unpack_from(unread)
            end = HEAD.size + length
            if len(unread) < end:
                return
            body = bytes(memoryview(unread)[HEAD.size : end])
            del unread[:end]
            if kind == LOST:  # the session ends, and closes the environment
                self.on_lost(SessionEnded(body.decode(), INTERNAL_ERROR_CLOSE))
            else:
                self._take(body if kind == FRAME else marshal.loads(body))  # noqa: S302  plain data

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for the supervisor's report of how the process has ended."""
        if self._timer is not None:
            self._timer.cancel()
        text = "The process of this session has ended."
        if self._is_closing or not (self.pid or self.number):
            self.fail(text)
        elif not self.ended.done():
            self._timer = self._loop.call_later(REASON_SECONDS, self.fail, text)

    def _take(self, answer: Any) -> None:
        if not self.begun.done():
            if "refused" in answer:
                self.fail(answer["refused"])
            else:
                self._begin(answer["pid"])
            return
        settle, _, _ = self._calls.popleft()
        if self._calls and not self._is_closing:
            self._send_first()
        settle(answer, None)

    def _begin(self, pid: int) -> None:
        self.pid = pid
        self._ends.by_pid[pid] = self
        self.begun.set_result(None)

    def _send_first(self) -> None:
        settle, request, fds = self._calls[0]
        message = _message(request)
        if fds:  # a transport sends none; it has nothing left to write, as calls go one at a time
            self._calls[0] = settle, request, ()
            try:
                socket.send_fds(self._end, [message], fds)
            except OSError as exc:
                log.warning("a session process is ended: it takes no descriptors (%s)", exc)
                self._ends.report("end", self)  # the call fails then
            close_all(fds)
        else:
            self._transport.write(message)


def _message(request: bytes) -> bytes:
    return HEAD.pack(len(request), VALUE) + request


class ProcessEnds:
    """The session processes of one shard, which the supervisor starts and whose ends it reports."""

    def __init__(self, link: MessageChannel, first: int, step: int, *, has_template: bool) -> None:
        """Sessions are numbered from `first` in steps of `step`; the number selects the GPU."""
        self.by_pid: dict[int, ProcessEnd] = {}
        self._started: dict[int, ProcessEnd] = {}  # by number, until they have ended
        self._numbers = itertools.count(1)
        self.devices = itertools.count(first, step)
        self._link = link
        self._template = Template(self) if has_template else None
        self._announced: dict[int, asyncio.Future[Json]] = {}

    async def new(self) -> ProcessEnd:
        """Return a process for a new session; raises `SessionError` if none can be started."""
        return await (self._template.take() if self._template else self.start().open())

    def start(self) -> ProcessEnd:
        """Ask the supervisor to start a process; `ProcessEnd.open` waits for it."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        number = next(self._numbers)
        self._link.send(Message({"session": number}, b"", (theirs.detach(),)))
        started = self._started[number] = ProcessEnd(self, ours, number)
        return started

    def forget(self, process: ProcessEnd) -> None:
        """Forget a process that has ended."""
        self.by_pid.pop(process.pid, None)
        self._started.pop(process.number, None)

    async def announce_copies(self, count: int) -> tuple[int, list[Json | None]]:
        """Tell the supervisor that copies will be made.

        Returns the number of the announcement, which `register_copies` must be called with, and a
        memory cgroup for each copy, or None where sessions have no cgroups.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._announced[number] = answer
        self._link.send(Message({"copies": count, "number": number}))
        try:
            return number, (await answer)["groups"]
        except BaseException:
            self.register_copies(number, [])
            raise

    def register_copies(self, number: int, pids: list[int]) -> None:
        """Report the pids of the copies that were made after an announcement."""
        self._link.send(Message({"copied": pids, "number": number}))

    def report(self, what: Literal["held", "over", "end"], process: ProcessEnd) -> None:
        """Report that a process has a session, or that the session is over; or have it killed.

        Everything that the process has started is killed with it.
        """
        if process.pid:
            self._link.send(Message({what: process.pid}))

    def take(self, head: Json) -> None:
        """Handle a message from the supervisor."""
        if "groups" in head:
            if not (answer := self._announced.pop(head["number"])).done():
                answer.set_result(head)
            return
        process = self._started.get(head["number"]) or self.by_pid.get(head["ended"])
        if process is not None:
            process.fail(head["text"])


class Template:
    """A shard's template process, from which the processes of new sessions are forked.

    Spare processes are forked in advance. Sessions that find none wait, and the next fork makes
    one process for each of them.
    """

    def __init__(self, ends: ProcessEnds) -> None:
        self._ends = ends
        self._process: ProcessEnd | None = None
        self._spares: deque[ProcessEnd] = deque()
        self._waiting: deque[asyncio.Future[ProcessEnd]] = deque()
        self._forking: asyncio.Task[None] | None = None

    async def take(self) -> ProcessEnd:
        """Return a process for a new session; raises `SessionError` if none can be forked."""
        waiting: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._hand_out()
        if self._forking is None or self._forking.done():
            self._forking = asyncio.create_task(self._fork())
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._spares.append(waiting.result())
            raise

    def _hand_out(self) -> None:
        while self._spares and self._waiting:
            if self._waiting[0].done():  # its client has left
                self._waiting.popleft()
            elif not (spare := self._spares.popleft()).is_lost:
                self._waiting.popleft().set_result(spare)

    async def _fork(self) -> None:
        """Fork a process for each waiting session, then spare ones; fewer if they do not fit."""
        most = MAX_COPIES
        while (count := min(most, len(self._waiting) or SPARES - len(self._spares))) > 0:
            try:
                async with asyncio.timeout(FORK_SECONDS):
                    if self._process is None or self._process.is_lost:
                        self._process = await self._ends.start().open()
                    self._spares += await self._process.copies(count, is_new=True)
            except Exception as exc:
                if isinstance(exc, BranchRefused) and count > 1:
                    most = count // 2
                    continue
                if isinstance(exc, TimeoutError) and self._process is not None:
                    self._ends.report("end", self._process)
                error = SessionError(f"The process of another session cannot be started. {exc}")
                while self._waiting:
                    if not (waiting := self._waiting.popleft()).done():
                        waiting.set_exception(error)
                return
            self._hand_out()


class RemoteSession(Session):
    """A session whose environment runs in a process of its own."""

    is_remote = True

    def __init__(self, ends: ProcessEnds, release: Callable[[Session], Any], *args: Any) -> None:
        """`release` ends the session; `args` are those of `Session`."""
        super().__init__(*args)
        self._ends = ends
        self._release = release
        self.process: ProcessEnd | None = None
        self._is_prepared = False

    @property
    def is_ready(self) -> bool:
        """Return whether the environment can be called."""
        return self._is_prepared

    @property
    def thread(self) -> Any:
        """The process end, to which calls are submitted as to a thread."""
        assert self.process is not None
        return self.process

    @property
    def needs_closing(self) -> bool:
        """Return whether the session has a process."""
        return self.process is not None

    def begin_at_once(self) -> bool:
        """Return False: a process has to be started."""
        return False

    async def begin(self) -> None:
        """Get a process, and create the environment in it."""
        self.call_began = asyncio.get_running_loop().time()
        self.running += 1
        try:
            self._begin_in(await self._ends.new())
            created = await self.ask("create", (self.id, next(self._ends.devices)))
        finally:
            self.call_ended()
        if (failure := created.get("failure")) is not None:
            self._factory.failure = failure
            raise FactoryFailed(self.definition.factory_name, created["text"])
        if "text" in created:
            raise SessionError(created["text"])
        self._factory.failure = ""
        if self.may_step is None:
            self.may_step = created["may_step"]
        self._is_prepared = True

    async def ask(self, kind: str, data: Any = None) -> Any:
        """Send a request and return the answer; raises `SessionEnded` if the process has ended."""
        return await self.thread.ask(kind, data)

    def continue_in(self, process: ProcessEnd) -> None:
        """Continue in a copy of a session's process; the process before, if any, ends."""
        if self.process is not None:
            self._end_process(self.process)
        self._begin_in(process)
        self._is_prepared = True

    def _begin_in(self, process: ProcessEnd) -> None:
        self.process = process
        self._ends.report("held", process)
        process.on_lost = self._process_lost

    def _process_lost(self, reason: SessionEnded) -> None:
        if self.socket is not None:
            self.socket.end(reason)
        else:
            self._release(self)

    def _end_process(self, process: ProcessEnd) -> asyncio.Future[None]:
        process.on_lost = lambda _: None
        self._ends.report("over", process)
        return process.close()

    def note_slow_creation(self) -> None:
        """Report that environments cannot be created; the stack is in the log."""
        seconds = asyncio.get_running_loop().time() - self.call_began
        self._factory.failure = f"the constructor has not returned for {seconds:.0f} s"
        if self.process is not None:
            self.process.write_stacks()

    async def leave(self) -> asyncio.Future[None]:
        """Close the environment; the future is done when the process has ended."""
        if self.process is not None:
            return self._end_process(self.process)
        ended = asyncio.get_running_loop().create_future()  # none was started
        ended.set_result(None)
        return ended
