# SPDX-License-Identifier: Apache-2.0
"""`RemoteSession`: a session whose environment is in a process of its own, as its shard has it.

    `SessionSocket` ─▶ `RemoteSession` ─▶ `ProcessEnd` ══ socket pair ══ session process
                 ◀── the finished frame, as it is ◀──┘                 (`shard/session_process.py`)
    `ProcessEnds`, all of one shard
        ── link: a process is wanted, copies are about to be made, end one ──▶ supervisor
        ◀── link: memory cgroups for copies, how a process has ended ──

The shard has the connection, framing, limits and time-outs. It parses no action, and loads nothing
that code of the environment has pickled. Calls go one at a time. What happens when

    the process ends            its call fails, and the session ends, with the supervisor's words.
                                If they do not come in `REASON_SECONDS`, without them
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
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ...system.process.descriptors import MAX_FDS, Message, close_all
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
        self._call_began = 0.0
        self._lost: SessionEnded | None = None
        self._is_closing = False
        self._timer: asyncio.TimerHandle | None = None
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def open(self) -> ProcessEnd:
        """Wait until the process has begun; raises `SessionEnded`: it could not, or has ended."""
        await self._loop.create_unix_connection(lambda: self, sock=self._end)
        await self.begun
        return self

    def submit(self, settle: Settle, kind: str, data: Any = None, *fds: int) -> None:
        """Have the process answer, then call `settle(answer, error)`. It is sent descriptors."""
        if self._lost is not None:
            close_all(fds)
            self._loop.call_soon(settle, None, self._lost)
            return
        self._calls.append((settle, marshal.dumps((kind, data)), fds))
        if len(self._calls) == 1:
            self._send_first()

    def stop(self) -> None:
        """Do nothing: the process ends with its session."""

    async def ask(self, kind: str, data: Any = None, *fds: int) -> Any:
        """Return the answer of the process; raises `SessionEnded`: it has ended."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(result)

        self.submit(settle, kind, data, *fds)
        return await answer

    async def copies(
        self, count: int, *, is_parked: bool = False, is_new: bool = False
    ) -> list[ProcessEnd]:
        """Have the process fork, all or none.

        Checkpoints are parked; new sessions begin in copies of a template. Raises `BranchRefused`:
        something forbids that; `SessionEnded`: the process has ended.
        """
        made: list[ProcessEnd] = []
        try:
            while len(made) < count:
                size = min(count - len(made), MAX_COPIES)
                made += await self._fork(size, is_parked=is_parked, is_new=is_new)
        except BaseException:
            for each in made:
                each.discard()
            raise
        return made

    async def _fork(self, count: int, *, is_parked: bool, is_new: bool) -> list[ProcessEnd]:
        number, groups = await self._ends.announce_copies(count)
        made = []
        try:
            pairs = [socket.socketpair() for _ in range(count)]
            made = [ProcessEnd(self._ends, ours) for ours, _ in pairs]
            request = {"groups": groups, "is_new": is_new}
            found = await self.ask("fork", request, *(theirs.detach() for _, theirs in pairs))
            if isinstance(found, str):
                raise BranchRefused(f"For a copy, {found}", WSErrorCode.BRANCH_MEMORY)
            if found:
                names = [name for reason, name in found if reason == found[0][0]]
                raise unsupported(Reason(found[0][0]), names)
            try:
                for each in made:
                    await each.open()
            except SessionEnded as exc:
                text = f"A copy of this session could not be made: {exc}"
                raise BranchRefused(text, WSErrorCode.BRANCH_MEMORY) from exc
        except BaseException:
            for each in made:
                each.discard()
            raise
        finally:
            pids = [each.pid for each in made if each.pid]
            self._ends.register_copies(number, pids, is_parked=is_parked)
        return made

    def close(self) -> asyncio.Future[None]:
        """Have the environment closed after the current call; return the end of the process."""
        if not (self._is_closing or self.ended.done()):
            self._is_closing = True
            began = self._call_began if self._calls else self._loop.time()
            self._timer = self._loop.call_at(began + PATIENCE_SECONDS, self._end_late)
            if self._transport is None:  # cancelled while it was being opened
                self.discard()
            else:
                self._transport.write(_message(marshal.dumps(("close", None))))
        return asyncio.shield(self.ended)

    def discard(self) -> None:
        """Let a process exit without closing its environment: a copy that was never used."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()
        else:
            self._end.close()
            self.fail("was not started")

    def _end_late(self) -> None:
        """End the process, since a call or `close` takes too long; its stacks go to the log."""
        text = "process %d is killed: its session ended, and a call or `close` has not returned"
        log.warning(text, self.pid)
        if number := stacks_signal():
            os.kill(self.pid, number)
        self._timer = self._loop.call_later(STACKS_SECONDS, self._ends.end, self.pid)

    def fail(self, how: str) -> None:
        """Note that the process has ended, and how, in words after `The process of … `."""
        if self.ended.done():
            return
        self._ends.forget(self)
        self._lost = SessionEnded(how, INTERNAL_ERROR_CLOSE)
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
        """Begin to read."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take the answers that have arrived whole."""
        unread = self._unread
        unread += data
        while len(unread) >= HEAD.size:
            length, kind = HEAD.unpack_from(unread)
            end = HEAD.size + length
            if len(unread) < end:
                return
            body = bytes(memoryview(unread)[HEAD.size : end])
            del unread[:end]
            if kind == LOST:
                self.close()
                self.fail(body.decode())
            else:
                self._take(body if kind == FRAME else marshal.loads(body))  # noqa: S302  plain data

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for the supervisor's words on why the process has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closing or not (self.pid or self.number):
            self.fail("The process of this session has ended.")
        else:
            text = "The process of this session has ended."
            self._timer = self._loop.call_later(REASON_SECONDS, self.fail, text)

    def _take(self, answer: Any) -> None:
        if not self.begun.done():
            if "refused" in answer:
                self.fail(answer["refused"])
            else:
                self.pid = answer["pid"]
                self._ends.by_pid[self.pid] = self
                self.begun.set_result(None)
            return
        settle, _, _ = self._calls.popleft()
        if self._calls:
            self._send_first()
        settle(answer, None)

    def _send_first(self) -> None:
        settle, request, fds = self._calls[0]
        self._call_began = self._loop.time()
        message = _message(request)
        if fds:  # a transport sends none; it has nothing left to write, as calls go one at a time
            socket.send_fds(self._end, [message], fds)
            close_all(fds)
            self._calls[0] = settle, request, ()
        else:
            self._transport.write(message)


def _message(request: bytes) -> bytes:
    return HEAD.pack(len(request), VALUE) + request


class ProcessEnds:
    """The session processes of one shard, as its supervisor starts and reports them."""

    def __init__(self, link: MessageChannel, first: int, *, has_template: bool) -> None:
        """`first` is the number of the first session, by which it gets a device."""
        self.by_pid: dict[int, ProcessEnd] = {}
        self._started: dict[int, ProcessEnd] = {}  # by number, until they have ended
        self._numbers = itertools.count(1)
        self.devices = itertools.count(first)
        self._link = link
        self._has_template = has_template
        self._template: asyncio.Task[ProcessEnd] | None = None
        self._announced: deque[asyncio.Future[Json]] = deque()

    async def new(self) -> ProcessEnd:
        """Return a process for a new session; raises `SessionError`: there can be none."""
        if not self._has_template:
            return await self._start().open()
        if self._template is None:
            self._template = asyncio.create_task(self._new_template())
        try:
            template = await asyncio.shield(self._template)
            [process] = await template.copies(1, is_new=True)
        except BranchRefused as exc:
            raise SessionError(f"The process of another session cannot be started. {exc}") from exc
        return process

    async def _new_template(self) -> ProcessEnd:
        template = self._start()
        template.on_lost = self._forget_template
        await template.open()
        self.note_over(template.pid)
        return template

    def _forget_template(self, _: SessionEnded) -> None:
        self._template = None  # the next session has another one

    def _start(self) -> ProcessEnd:
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
        """Report that copies are about to be made; return a number, and a cgroup for each, or None.

        `register_copies` must follow, with that number.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._announced.append(answer)
        self._link.send(Message({"copies": count, "number": number}))
        try:
            return number, (await answer)["groups"]
        except BaseException:
            self.register_copies(number, [], is_parked=False)
            raise

    def register_copies(self, number: int, pids: list[int], *, is_parked: bool) -> None:
        """Report which copies have been made, since they were announced."""
        self._link.send(Message({"copied": pids, "number": number, "is_parked": is_parked}))

    def end(self, pid: int) -> None:
        """Have a process killed, with all that it has started."""
        self._link.send(Message({"end": pid}))

    def note_over(self, pid: int) -> None:
        """Report that the session of a process is over."""
        self._link.send(Message({"over": pid}))

    def take(self, head: Json) -> None:
        """Take a message of the supervisor."""
        if "groups" in head:
            if not (answer := self._announced.popleft()).done():
                answer.set_result(head)
            return
        process = self._started.get(head["number"]) or self.by_pid.get(head["ended"])
        if process is not None:
            process.fail(head["text"])


class RemoteSession(Session):
    """A session whose environment is in a process of its own."""

    is_remote = True

    def __init__(self, ends: ProcessEnds, release: Callable[[Session], Any], *args: Any) -> None:
        """`release` ends a session of the table; the other arguments are a session's."""
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
        """Return where calls run: in the process."""
        return self._own_process

    @property
    def _own_process(self) -> ProcessEnd:
        assert self.process is not None
        return self.process

    @property
    def needs_closing(self) -> bool:
        """Return whether there is a process that is to end."""
        return self.process is not None

    def begin_at_once(self) -> bool:
        """Return False: a process has to be started."""
        return False

    async def begin(self) -> None:
        """Start the process, and have it create the environment."""
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
        """Return the answer of the process; raises `SessionEnded`: it has ended."""
        return await self._own_process.ask(kind, data)

    async def copies(self, count: int, *, is_parked: bool = False) -> list[ProcessEnd]:
        """Have the process forked; raises as `ProcessEnd.copies`."""
        return await self._own_process.copies(count, is_parked=is_parked)

    def continue_in(self, process: ProcessEnd) -> None:
        """Continue in a process that was forked from a session's; the one before, if any, ends."""
        if self.process is not None:
            self._end_process(self.process)
        self._begin_in(process)
        self._is_prepared = True

    def _begin_in(self, process: ProcessEnd) -> None:
        self.process = process
        process.on_lost = self._process_lost

    def _process_lost(self, reason: SessionEnded) -> None:
        if self.socket is not None:
            self.socket.end(reason)
        else:
            self._release(self)

    def _end_process(self, process: ProcessEnd) -> asyncio.Future[None]:
        process.on_lost = lambda _: None
        if process.pid:
            self._ends.note_over(process.pid)
        return process.close()

    def note_slow_creation(self) -> None:
        """Report that environments cannot be created; the stack is in the log."""
        seconds = asyncio.get_running_loop().time() - self.call_began
        self._factory.failure = f"the constructor has not returned for {seconds:.0f} s"
        if self.process is not None and self.process.pid and (number := stacks_signal()):
            os.kill(self.process.pid, number)

    async def leave(self) -> asyncio.Future[None]:
        """Have the environment closed; a future of the end of its process."""
        if self.process is not None:
            return self._end_process(self.process)
        ended = asyncio.get_running_loop().create_future()  # none was started
        ended.set_result(None)
        return ended

    def release_thread(self) -> None:
        """Do nothing: the process ends by itself."""
