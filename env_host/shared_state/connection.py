# SPDX-License-Identifier: Apache-2.0
"""A shard's connection to one epoch of the state process, and its link to the current epoch.

    call ─▶ (room?) ─▶ CALL, `_sent` ─▶ REPLY / FAILURE / EOF ─▶ result, failure, loss

A call counts as in flight until its *reply* comes, not only while its caller waits: a stalled state
process is not flooded with abandoned calls. Calls wait for room in the order in which they come;
there is no room while the socket is full. A request id is never used twice on a connection, and an
unexpected reply ends the connection, so that no caller can get the reply of another.

`StateProxy`: what an environment sees of the shared state, as `self.world`.

observation = await self.world.look(x=3)                   # a method of the state
facts, mixed = await self.world.mix(pcm, at=position)      # bytes in, (value, bytes) out
await self.world.within(0.5).mix(pcm, at=position)         # another deadline than 10 s
self.world.wait_for(self.world.look(x=3))                  # from a synchronous environment
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from . import frames

MAX_CALLS = 1024  # of one shard, sent and not answered; the others wait in the shard
GREETING_SECONDS = 5.0  # between connect and WELCOME
RETRY_SECONDS = 0.05  # between two attempts to connect again
MAX_SENT_BYTES = 32 << 20  # of the bodies of such calls; the last call may exceed it
EXPIRED = "expired"  # the type of a failure whose call ran out of time; not an exception's name

OnLost = Callable[[frames.WorldLost], None]

log = logging.getLogger("openenvd.env_host")


class Sent(NamedTuple):
    """A call until its reply; its future may be done long before."""

    future: asyncio.Future[Any]
    session: int
    method: str
    body_bytes: int


class Connection(frames.WireProtocol):
    """One connection to one epoch of the state process."""

    def __init__(self, on_lost: OnLost) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._sent: dict[int, Sent] = {}  # by request id
        self._sent_bytes = 0  # of their bodies, which the state process may hold until it replies
        self._turn = asyncio.Lock()  # of the one call that waits for room; the others are behind it
        self._room = asyncio.Event()
        self._is_full = False  # the socket: the state process does not read
        self._request_ids, self.session_numbers = itertools.count(1), itertools.count(1)
        self.epoch = self.state_pid = 0
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.lost: frames.WorldLost | None = None
        self.closed = asyncio.Event()

    async def call(
        self, session: int, method: str, arguments: Any, body: frames.Buffer | None, deadline: float
    ) -> Any:
        """Return the method's result; `deadline` is monotonic. Raises as `StateProxy.call`."""
        value = frames.encode_value([method, deadline, arguments])
        future = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                async with self._turn:
                    await self._room.wait()
                    if self.lost is not None:
                        raise frames.WorldLost(str(self.lost))
                    request_id, size = next(self._request_ids), memoryview(body or b"").nbytes
                    frame = frames.encode(
                        frames.Kind.CALL, self.epoch, session, request_id, value, body
                    )
                    future = self._loop.create_future()
                    self._sent[request_id] = Sent(future, session, method, size)
                    self._sent_bytes += size
                    self._note_room()
                    self.send(frame)
                return await future
        except TimeoutError:
            if future is not None:
                text = "was not answered in time; whether it had effects is not known."
                raise frames.WorldTimeout(f"world.{method} {text}") from None
            text = f"was not sent in time: {len(self._sent)} calls have not been answered."
            raise frames.WorldBusy(f"world.{method} {text}") from None

    def leave(self, session: int) -> None:
        """Report to the state process that a session is over."""
        self.send(frames.encode(frames.Kind.LEAVE, self.epoch, session))

    def pause_writing(self) -> None:
        """Make calls wait: the state process does not read those that were sent."""
        self._is_full = True
        self._note_room()

    def resume_writing(self) -> None:
        """Send calls again."""
        self._is_full = False
        self._note_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all calls at once; none is sent again."""
        super().connection_lost(exc)
        reason = f": {self.fault or exc}" if self.fault or exc else ""
        self.lost = frames.WorldLost(
            f"The process that holds the shared state (pid {self.state_pid}, epoch {self.epoch}) "
            f"is gone{reason}. What the session did there is lost; open a new session."
        )
        for future in (self.welcomed, *(sent.future for sent in self._sent.values())):
            if not future.done():
                future.set_exception(frames.WorldLost(str(self.lost)))
                future.exception()  # its caller may have given up
        self._room.set()  # for those that wait, to see that it is lost
        self.closed.set()
        self._on_lost(self.lost)

    def _note_room(self) -> None:
        has_room = len(self._sent) < MAX_CALLS and self._sent_bytes < MAX_SENT_BYTES
        if has_room and not self._is_full:
            self._room.set()
        else:
            self._room.clear()

    def _handle(self, frame: frames.Frame) -> None:
        if not self.welcomed.done():
            if frame.kind != frames.Kind.WELCOME or not isinstance(frame.value, int):
                raise frames.WireError("the first frame is not WELCOME")
            self.epoch, self.state_pid = frame.epoch, frame.value
            self.welcomed.set_result(None)
            self._note_room()
        elif frame.epoch != self.epoch or frame.kind not in (
            frames.Kind.REPLY,
            frames.Kind.FAILURE,
        ):
            raise frames.WireError(
                f"a frame of kind {frame.kind} and epoch {frame.epoch} of the state"
            )
        else:
            self._answer(frame)

    def _answer(self, frame: frames.Frame) -> None:
        sent = self._sent.get(frame.request_id)
        if sent is None or sent.session != frame.session:
            raise frames.WireError(f"a reply to call {frame.request_id}, which is not in flight")
        del self._sent[frame.request_id]
        self._sent_bytes -= sent.body_bytes
        self._note_room()
        if sent.future.done():  # its caller has given up
            return
        if frame.kind == frames.Kind.FAILURE:
            kind, message = frame.value
            late = frames.WorldTimeout(f"world.{sent.method} did not finish in time: {message}.")
            failed = frames.WorldCallFailed(f"world.{sent.method}: {kind}: {message}")
            sent.future.set_exception(late if kind == EXPIRED else failed)
        elif frame.body is None or not frame.has_value:
            sent.future.set_result(frame.value if frame.body is None else frame.body)
        else:
            sent.future.set_result((frame.value, frame.body))


class StateLink:
    """The connection of a shard to the current state process, for the shard's whole life."""

    def __init__(self, address: str, on_lost: OnLost = lambda lost: None) -> None:
        """Begin to connect; `on_lost` is called each time a connection is lost."""
        self._address = address
        self.on_lost = on_lost
        self.connection: Connection | None = None  # if there is one now
        self._connected = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._keeping = self.loop.create_task(self._keep_connected(), name="shared-state-connect")

    async def current(self, deadline: float) -> Connection:
        """Return the connection, or the next one; raises `WorldError` at the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline - time.monotonic()):
                while self.connection is None and not self._keeping.done():
                    await self._connected.wait()
        if self.connection is None:
            raise frames.WorldError("The process that holds the shared state cannot be reached.")
        return self.connection

    async def close(self) -> None:
        """Close the connection, and do not connect again."""
        self.on_lost = lambda lost: None
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        if (connection := self.connection) is not None:
            connection.close()
            await connection.closed.wait()
        self._connected.set()

    async def _keep_connected(self) -> None:
        while True:
            try:
                self.connection = await self._connect()
            except (OSError, frames.WorldLost) as exc:
                log.debug("shared state: not connected: %s", exc)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._connected.set()
                await self.connection.closed.wait()

    async def _connect(self) -> Connection:
        """Connect; return after WELCOME, unless the connection is lost by then."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        connection = Connection(self._lost)
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                await self.loop.sock_connect(sock, socket_name(self._address))
                await self.loop.create_connection(lambda: connection, sock=sock)
                await connection.welcomed
                if connection.lost is not None:
                    raise connection.lost
        except BaseException:
            connection.close()
            sock.close()
            raise
        return connection

    def _lost(self, lost: frames.WorldLost) -> None:
        if self.connection is not None:  # else it was never welcomed
            self.connection = None
            self._connected.clear()
            self.on_lost(lost)


def socket_name(address: str) -> str:
    """Return the kernel's form of an address; `@…` has no file (unix(7), abstract)."""
    return "\0" + address[1:] if address.startswith("@") else address


CALL_SECONDS = 10.0  # of one call, its wait included, unless the caller says otherwise

Result = TypeVar("Result")


class Methods:
    """The methods of the state, each called as `call(its name, …)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)


class StateProxy(Methods):
    """The shared state, for one session; bound to one epoch of it from its first call on.

    What the session did is lost with that epoch, so it is never bound to a later one.
    """

    def __init__(self, link: StateLink) -> None:
        super().__init__(self.call)
        self._link = link
        self._connection: Connection | None = None
        self._session = 0

    def within(self, seconds: float) -> Methods:
        """Return the methods with another deadline."""
        return Methods(functools.partial(self.call, within_seconds=seconds))

    async def call(
        self,
        method: str,
        body: frames.Buffer | None = None,
        /,
        *,
        within_seconds: float = CALL_SECONDS,
        **arguments: Any,
    ) -> Any:
        """Call a method of the state, and return None, a JSON value, bytes, or (value, bytes).

        Raises `WorldError`, and `ValueError` when an argument has no JSON form or the
        deadline is no number.
        """
        if not math.isfinite(within_seconds):
            raise ValueError(f"within: write a number of seconds, not {within_seconds}")
        deadline = time.monotonic() + within_seconds
        if self._connection is None:
            connection = await self._link.current(deadline)
            if self._connection is None:  # another call of the session may have been quicker
                self._connection, self._session = connection, next(connection.session_numbers)
        return await self._connection.call(self._session, method, arguments, body, deadline)

    def wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of a coroutine of this proxy; from a thread, never on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._link.loop).result()

    def leave(self) -> None:
        """End the session; may be called from any thread, and again."""
        with suppress(RuntimeError):  # the loop is closed: the connection has ended anyway
            self._link.loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.leave(self._session)


class ProxyFactory:
    """Makes environments that have a `world` before their constructor runs."""

    def __init__(self, factory: Callable[[], Any], link: StateLink) -> None:
        self.func = factory  # as in `functools.partial`: what this wraps
        self._link = link
        functools.update_wrapper(self, factory, updated=())

    def __call__(self) -> Any:
        """Return a new environment."""
        world = StateProxy(self._link)
        factory: Any = self.func
        if inspect.isclass(factory):
            env: Any = factory.__new__(factory)
            env.world = world
            factory.__init__(env)
        else:
            env = factory()
            env.world = world
        close = getattr(env, "close", None)

        def close_and_leave() -> Any:
            try:
                return close() if close is not None else None
            finally:
                world.leave()

        env.close = close_and_leave
        return env
