# SPDX-License-Identifier: Apache-2.0
"""`StateProxy`: what an environment sees of the shared state, as `self.world`.

observation = await self.world.look(x=3)                   # a method of the state
facts, mixed = await self.world.mix(pcm, at=position)      # bytes in, (value, bytes) out
await self.world.within(0.5).mix(pcm, at=position)         # another deadline than 10 s
self.world.blocking.look(x=3)                              # from a synchronous environment
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from .connection import Connection, StateLink
from .frames import Buffer

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

    @property
    def blocking(self) -> Methods:
        """The methods for synchronous environments; never to be called on the event loop."""
        return Methods(lambda *args, **kwargs: self.wait_for(self.call(*args, **kwargs)))

    def within(self, seconds: float) -> Methods:
        """Return the methods with another deadline."""
        return Methods(functools.partial(self.call, within_seconds=seconds))

    async def call(
        self,
        method: str,
        body: Buffer | None = None,
        /,
        *,
        within_seconds: float = CALL_SECONDS,
        **arguments: Any,
    ) -> Any:
        """Call a method of the state; returns None, a JSON value, bytes, or (value, bytes).

        Raises `WorldError` (`errors.py`), and `ValueError` when an argument has no JSON form or the
        deadline is no number.
        """
        if not math.isfinite(within_seconds):
            raise ValueError(f"within: write a number of seconds, not {within_seconds}")
        deadline = time.monotonic() + within_seconds
        connection = self._connection or await self._bind(deadline)
        return await connection.call(self._session, method, arguments, body, deadline)

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

    async def _bind(self, deadline: float) -> Connection:
        connection = await self._link.current(deadline)
        if self._connection is None:  # another call of the session may have been quicker
            self._connection = connection
            self._session = next(connection.session_numbers)
        return self._connection


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
