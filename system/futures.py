# SPDX-License-Identifier: Apache-2.0
"""Futures of a loop that other threads answer: its waiter may be gone, and so may the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def tell_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function on a loop, from any thread; nothing is done when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # closed; `suppress` would double what this costs
        return


def settle(answer: asyncio.Future[_T], result: _T, error: BaseException | None) -> None:
    """Set a future's result or error, on its loop, unless its waiter was cancelled."""
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
