# SPDX-License-Identifier: Apache-2.0
"""Futures of a loop that other threads answer: whoever waited may be gone, and so may the loop.

Standard library alone, for any room.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def tell_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """From any thread. A loop that has been closed waits for nothing."""
    with contextlib.suppress(RuntimeError):  # closed
        loop.call_soon_threadsafe(function, *arguments)


def settle(answer: asyncio.Future[_T], result: _T, error: BaseException | None) -> None:
    """On the loop. Whoever was cancelled waits no longer."""
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
