# SPDX-License-Identifier: Apache-2.0
"""How long one call of a policy may take.

The clock stands still while the call waits in line for a thread (`cpu_threads.py`): a policy is not
to blame for how many others are asked beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

from ..episodes import FailureReason
from ..errors import EpisodeFailed

_running: ContextVar[asyncio.Timeout | None] = ContextVar("call_clock", default=None)


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """What is awaited inside is one call."""
    timeout = asyncio.timeout(seconds)
    token = _running.set(timeout)
    try:
        async with timeout:
            yield
    except TimeoutError as exc:
        if not timeout.expired():
            raise
        told = f"the policy took more than {seconds:g} s"
        raise EpisodeFailed(FailureReason.POLICY_TIMED_OUT, told) from exc
    finally:
        _running.reset(token)


def stop() -> Callable[[], None] | None:
    """Let the clock of this call stand still until what is returned is called, on the loop.

    None: there is no clock.
    """
    timeout = _running.get()
    return None if timeout is None else pause(timeout)


def pause(timeout: asyncio.Timeout) -> Callable[[], None] | None:
    """Let a time-out stand still until what is returned is called. None: it has no limit."""
    when = timeout.when()
    if when is None:
        return None
    clock = asyncio.get_running_loop().time
    left = when - clock()
    timeout.reschedule(None)
    return lambda: timeout.reschedule(clock() + left)
