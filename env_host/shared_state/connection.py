# SPDX-License-Identifier: Apache-2.0
"""A shard's connection to one epoch of the state process, and its link to whichever there is.

    World.call ─▶ Pending ─▶ _queue ─(room?)─▶ _sent ─▶ socket
                    ▲                            │
                    └── result, failure, loss ◀──┴── REPLY / FAILURE / EOF

A call counts as in flight until its *reply* comes, not only while its caller waits: a stalled state
process is not flooded with abandoned calls.
A reply finds its call by request id, which is never used twice, on a connection that belongs to
one epoch; a reply that fits no call ends the connection. No caller can get the reply of another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from . import frames as wire
from .errors import (
    BodyTooLarge,
    WireError,
    WorldBusy,
    WorldCallFailed,
    WorldError,
    WorldLost,
    WorldTimeout,
)
from .frames import DEFAULT_LIMITS, Frame, Kind, Limits
from .methods import EXPIRED, decode_result

log = logging.getLogger("openenvd.env_host")


@dataclass(slots=True, eq=False)
class Pending:
    """A call from its start until its reply; its future may be done long before."""

    future: asyncio.Future[Any]
    session: int
    method: str
    value: bytes
    body: wire.Buffer | None
    deadline: float

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, unless it has given up."""
        if not self.future.done():
            self.future.set_exception(error)


class Connection(wire.WireProtocol):
    """One connection to one epoch of the state process."""

    def __init__(self, on_lost: Callable[[WorldLost], None], limits: Limits) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._limits = limits
        self._queue: deque[Pending] = deque()
        self._sent: dict[int, tuple[Pending, int]] = {}  # by request id; and the body's bytes
        self._bytes = 0
        self._last_id = 0
        self._last_session = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._fault: WireError | None = None
        self.epoch = 0
        self.state_pid = 0
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.lost: WorldLost | None = None
        self.closed = asyncio.Event()

    def new_session(self) -> int:
        """Return a number that no other session of this connection has or had."""
        self._last_session += 1
        return self._last_session

    def call(
        self, session: int, method: str, value: bytes, body: wire.Buffer | None, deadline: float
    ) -> asyncio.Future[Any]:
        """Return a future of the method's result; `deadline` is monotonic."""
        future = self._loop.create_future()
        pending = Pending(future, session, method, value, body, deadline)
        if self.lost is not None:
            pending.fail(self.lost)
        elif body is not None and len(body) > wire.MAX_BODY_BYTES:
            pending.fail(
                BodyTooLarge(f"a body of {len(body)} bytes is more than {wire.MAX_BODY_BYTES}")
            )
        elif len(self._queue) >= self._limits.max_waiting:
            pending.fail(WorldBusy(f"{len(self._queue)} calls wait to be sent already"))
        else:
            self._queue.append(pending)
            self._pump()
            self._watch(deadline)
        return future

    def leave(self, session: int) -> None:
        """Tell the state process that a session is over."""
        self.send(wire.encode(Kind.LEAVE, epoch=self.epoch, session=session))

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is complete, and send the calls that there is room for then."""
        super().buffer_updated(nbytes)
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls at once; none is sent again."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        reason = f": {self._fault or exc}" if self._fault or exc else ""
        self.lost = WorldLost(
            f"The process that holds the shared state (pid {self.state_pid}, epoch {self.epoch}) "
            f"is gone{reason}. What the session did there is lost; open a new session."
        )
        self._fail_all(self.lost)
        self.closed.set()
        self._on_lost(self.lost)

    def _fail_all(self, lost: WorldLost) -> None:
        if not self.welcomed.done():
            self.welcomed.set_exception(lost)
            self.welcomed.exception()  # its caller may have given up
        everything = [pending for pending, _ in self._sent.values()] + list(self._queue)
        self._sent.clear()
        self._queue.clear()
        for pending in everything:
            pending.fail(WorldLost(str(lost)))

    def _pump(self) -> None:
        """Send the calls that there is room for, in order; drop those whose caller has given up."""
        while self._queue:
            pending = self._queue[0]
            size = 0 if pending.body is None else len(pending.body)
            if not pending.future.done():
                if not self._limits.has_room(len(self._sent), self._bytes, size):
                    return
                self._send(pending, size)
            self._queue.popleft()

    def _send(self, pending: Pending, size: int) -> None:
        self._last_id += 1
        self._sent[self._last_id] = (pending, size)
        self._bytes += size
        self.send(
            wire.encode(
                Kind.CALL,
                epoch=self.epoch,
                session=pending.session,
                request_id=self._last_id,
                deadline_us=int(pending.deadline * 1e6),
                name=pending.method.encode(),
                value=pending.value,
                body=pending.body,
            )
        )
        pending.body = None  # from here on it is the socket's

    def _note_fault(self, exc: WireError) -> None:
        log.warning("shared state: %s; the connection is closed", exc)
        self._fault = exc

    def _handle(self, frame: Frame) -> None:
        if not self.welcomed.done():
            self._welcome(frame)
        elif frame.epoch != self.epoch:
            raise WireError(f"a reply of epoch {frame.epoch}; this is {self.epoch}")
        elif frame.kind in (Kind.REPLY, Kind.FAILURE):
            self._answer(frame)
        else:
            raise WireError(f"a frame of kind {frame.kind} from the state process")

    def _welcome(self, frame: Frame) -> None:
        if frame.kind != Kind.WELCOME or not isinstance(frame.value, dict):
            raise WireError("the first frame is not WELCOME")
        self.epoch = frame.epoch
        self.state_pid = frame.value.get("pid", 0)
        self.welcomed.set_result(None)

    def _answer(self, frame: Frame) -> None:
        pending, size = self._sent.get(frame.request_id, (None, 0))
        if pending is None or pending.session != frame.session:
            raise WireError(f"a reply to call {frame.request_id}, which is not in flight")
        del self._sent[frame.request_id]
        self._bytes -= size
        if pending.future.done():  # its caller has given up
            return
        if frame.kind == Kind.REPLY:
            pending.future.set_result(decode_result(frame.flags, frame.value, frame.body))
        else:
            pending.future.set_exception(_failure(pending.method, frame.value))

    def _watch(self, deadline: float) -> None:
        """Set the one timer of all calls to the earliest deadline seen since it fired."""
        if deadline >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        self._timer, self._timer_at = None, float("inf")
        for pending, _ in self._sent.values():
            if pending.deadline <= now:
                pending.fail(
                    WorldTimeout(
                        f"world.{pending.method} was not answered in time; whether it had effects "
                        "is not known."
                    )
                )
        for pending in self._queue:
            if pending.deadline <= now:
                pending.fail(WorldBusy(_no_room(pending.method, len(self._sent), self._bytes)))
        self._pump()
        alive = [p for p, _ in self._sent.values() if not p.future.done()]
        alive += [p for p in self._queue if not p.future.done()]
        if alive:
            self._watch(min(pending.deadline for pending in alive))


async def open_connection(
    address: str, shard: str, on_lost: Callable[[WorldLost], None], limits: Limits
) -> Connection:
    """Connect; return after WELCOME, or raise `OSError`, `TimeoutError` or `WorldLost`."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(on_lost, limits)
    try:
        async with asyncio.timeout(limits.greeting_seconds):
            sock.setblocking(False)
            await loop.sock_connect(sock, socket_name(address))
            await loop.sock_sendall(sock, wire.encode(Kind.HELLO, name=shard.encode()))
            await loop.create_connection(lambda: connection, sock=sock)
            await connection.welcomed
    except BaseException:
        connection.close()
        sock.close()
        raise
    return connection


class StateLink:
    """The connection of a shard to the current state process, for the shard's whole life.

    It connects again when the state process was replaced. A `StateProxy` is bound to the connection
    of its first call, and never to a later one: what its session did is in the state that is gone.
    """

    def __init__(
        self,
        address: str,
        shard: str,
        on_lost: Callable[[WorldLost], None] = lambda lost: None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._address = address
        self._shard = shard
        self.on_lost = on_lost
        self.connection: Connection | None = None  # if there is one now
        self._changed = asyncio.Event()  # a new one with each connection
        self._again: asyncio.Task[None] | None = None
        self._closed = False
        self.loop = asyncio.get_running_loop()

    async def connect(self) -> None:
        """Connect for the first time; raises `WorldError` when there is no state process."""
        self._connect_again()
        await self.current(time.monotonic() + self._limits.connect_seconds)

    async def current(self, deadline: float) -> Connection:
        """Return the connection, or the next one; raises `WorldError` at the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                while self.connection is None and not self._closed:
                    await self._changed.wait()
        if self.connection is None:
            raise WorldError("The process that holds the shared state cannot be reached.")
        return self.connection

    async def close(self) -> None:
        """Close the connection, and do not connect again."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
            await asyncio.wait({self._again})
        if self.connection is not None:
            self.connection.close()
            await self.connection.closed.wait()
        self._announce()

    def _connect_again(self) -> None:
        self._again = self.loop.create_task(self._reconnect(), name="shared-state-connect")

    async def _reconnect(self) -> None:
        while not self._closed:
            try:
                self.connection = await open_connection(
                    self._address, self._shard, self._lost, self._limits
                )
            except (OSError, TimeoutError, WorldLost) as exc:
                log.debug("shared state: not connected: %s", exc)
                await asyncio.sleep(self._limits.retry_seconds)
            else:
                self._announce()
                return

    def _lost(self, lost: WorldLost) -> None:
        if self.connection is None:  # it was never welcomed: `_reconnect` is at it
            return
        self.connection = None
        if not self._closed:
            self._connect_again()
            self.on_lost(lost)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def connect_state(
    address: str,
    shard: str,
    on_lost: Callable[[WorldLost], None] = lambda lost: None,
    limits: Limits = DEFAULT_LIMITS,
) -> StateLink:
    """Connect a shard to the state process; `on_lost` is called each time a connection is lost.

    When there is no state process now, it is not waited for long: sessions wait for it.
    """
    link = StateLink(address, shard, on_lost, limits)
    with suppress(WorldError):
        await link.connect()
    return link


def socket_name(address: str) -> str:
    """Return the kernel's form of an address; `@…` has no file (unix(7), abstract)."""
    return "\0" + address[1:] if address.startswith("@") else address


def _failure(method: str, value: Any) -> WorldError:
    facts = value if isinstance(value, dict) else {}
    if facts.get("type") == EXPIRED:
        return WorldTimeout(f"world.{method} did not finish in time: {facts.get('message')}.")
    return WorldCallFailed(method, str(facts.get("type")), str(facts.get("message")))


def _no_room(method: str, calls: int, in_flight_bytes: int) -> str:
    return (
        f"world.{method} was not sent in time: {calls} calls with {in_flight_bytes} bytes "
        "before it have not been answered."
    )
