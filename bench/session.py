# SPDX-License-Identifier: Apache-2.0
"""What every measured session has: its clock, its outcome, and exactly one end.

The two protocols stand in `ws_session.py` and `http_session.py`.

The total counts from the start of the batch (`started_at`), and so does connecting: not from when
this process began the session. A generator that is late must not look like a server that
is quick.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

MAX_MESSAGE_CHARS = 300  # of an error


@dataclass(slots=True)
class Outcome:
    """The result of one session; latencies are None for phases it did not get through."""

    connect_seconds: float | None = None
    reset_seconds: float | None = None
    step_seconds: float | None = None
    total_seconds: float = 0.0
    observation: dict[str, Any] | None = None
    error_kind: str | None = None
    error_message: str | None = None
    retransmits: int = 0  # of the kernel: a handshake that found the server's queue full


class Owner(Protocol):
    """The generator of a session, which counts how far its sessions are."""

    def admitted(self) -> None:
        """Count a session whose connection was accepted."""

    def held(self) -> None:
        """Count a session that was reset and is held open."""

    def ended(self, session: MeasuredSession) -> None:
        """Record a session that has ended."""


class MeasuredSession(asyncio.Protocol):
    """One connection from its first byte to its last."""

    def __init__(self, owner: Owner, started_at: float, *, hold: bool = False) -> None:
        self.outcome = Outcome()
        self.is_over = False
        self.is_admitted = False
        self.dialled_at = started_at  # when its own connection was begun
        self._owner = owner
        self._started_at = started_at
        self._began = started_at  # the phase that is under way
        self._hold = hold
        self._unread = b""
        self._transport: asyncio.Transport | None = None

    @property
    def is_connected(self) -> bool:
        """Whether its handshake is over."""
        return self.outcome.connect_seconds is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first message of the session."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self._open()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record how the session ended."""
        if self.outcome.step_seconds is not None:
            self._end()  # not the politest end, but the session had all it came for
        self.fail("connection_lost", f"the server closed the connection{f': {exc}' if exc else ''}")

    def fail(self, kind: str, message: str) -> None:
        """End it as a failure, unless it has ended."""
        if not self.is_over:
            self.outcome.error_kind = kind
            self.outcome.error_message = message[:MAX_MESSAGE_CHARS]
            self._end()

    def release(self) -> None:
        """Let a session that is held continue."""
        if self._hold and not self.is_over and self.outcome.reset_seconds is not None:
            self._hold = False
            self._step()

    def _open(self) -> None:
        """Send the first message."""
        raise NotImplementedError

    def _step(self) -> None:
        """Take the step."""
        raise NotImplementedError

    def _was_admitted(self) -> None:
        self.is_admitted = True
        self._owner.admitted()

    def _was_reset(self) -> None:
        self.outcome.reset_seconds = self._phase_over()
        if self._hold:
            self._owner.held()
        else:
            self._step()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _phase_over(self) -> float:
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        return seconds

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.outcome.total_seconds = time.monotonic() - self._started_at
        if self._transport is not None:
            self._transport.close()
        self._owner.ended(self)
