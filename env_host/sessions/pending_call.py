# SPDX-License-Identifier: Apache-2.0
"""`Call`: one thing that a session's socket waits for, and where its outcome goes.

An outcome that is not waited for any more (the client left, time was up) is dropped here; a slot
that came too late is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from .session import Session

Settle = Callable[[Any, BaseException | None], None]

log = logging.getLogger("openenvd.env_host")


class Caller(Protocol):
    """Who waits."""

    def is_waiting_for(self, call: Call) -> bool:
        """Whether the outcome of `call` is still wanted."""

    def give_back(self, session: Session) -> None:
        """End a session that has come too late."""


class Call:
    """Something of the environment that is being waited for."""

    __slots__ = ("future", "name", "settle", "socket", "timer")

    def __init__(self, socket: Caller, settle: Settle, name: str = "") -> None:
        self.socket = socket
        self.name = name  # of what a message asked for; empty while the session begins
        self.settle = settle
        self.future: asyncio.Future[Any] | None = None  # None: it runs on a thread
        self.timer: asyncio.TimerHandle | None = None

    def watch(self, future: asyncio.Future[Any]) -> None:
        """Take the outcome of `future` for the call's."""
        self.future = future
        future.add_done_callback(self._done)

    def settled(self, result: Any, error: BaseException | None) -> None:
        """The outcome is here."""
        if self.socket.is_waiting_for(self):
            self.settle(result, error)
        elif isinstance(result, Session):  # its slot came when its client had just gone
            self.socket.give_back(result)
        elif error is not None:
            log.info("a call that nobody waits for any more failed: %r", error)

    def _done(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self.settled(None, RuntimeError("the environment cancelled its own call"))
        else:
            error = future.exception()
            self.settled(None if error else future.result(), error)
