# SPDX-License-Identifier: Apache-2.0
"""`FollowedLog`: the log that a page shows, on the page's one stream.

    open_log(deps, "requests/ID")        what a request printed, until it is final
    open_log(deps, "environments/NAME")  what the youngest replica prints

It begins with the last lines, and goes on as they are written (`events/log_files.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import orjson

from ..api.dependencies import Dependencies
from ..api.routes_environments import log_of
from ..api.streams import request_ends
from ..errors import ApiError
from ..events.log_files import LogFile, offset_of_last_lines

REQUEST_LINES = 5000
ENVIRONMENT_LINES = 200


class FollowedLog:
    """One log, as events of the stream.

    Args:
        log: The log, at the offset where its text begins; None: there is none yet.
        end: Done when nothing more is written.
    """

    def __init__(self, log: LogFile | None, end: asyncio.Future[Any]) -> None:
        self._log = log
        self._end = end
        self._is_first = True

    def messages(self) -> Iterator[bytes]:
        """Yield what was written since the last call, in whole lines; at the end, all of it.

        The first event says that the text begins with it.
        """
        if self._is_first:
            self._is_first = False
            yield _event("", is_first=True)
        if self._log is not None:
            is_over = self._end.done()
            for text in self._log.read_all() if is_over else self._log.read_lines():
                yield _event(text)


@asynccontextmanager
async def open_log(
    deps: Dependencies, name: str, wake: asyncio.Event
) -> AsyncIterator[FollowedLog]:
    """Open a log, and set `wake` when there is more of it.

    Args:
        deps: The daemon's parts.
        name: Of a request that is not known, or an environment that has printed nothing, it is
            empty: the page learns of that elsewhere.
        wake: Set on the loop.
    """
    kind, _, key = name.partition("/")
    async with AsyncExitStack() as stack:
        log = None
        ends: Callable[[], Coroutine[Any, Any, object]] = deps.stopping.wait
        with suppress(ApiError):
            if kind == "requests":
                request = await deps.submitter.find(key)
                path, lines = deps.paths.request_log(request.id), REQUEST_LINES
                ends = partial(request_ends, deps, request)
            else:
                path = log_of(deps, await deps.submitter.environment(key), None)
                lines = ENVIRONMENT_LINES
            log = LogFile(path, await asyncio.to_thread(offset_of_last_lines, path, lines))
            stack.enter_context(deps.logs.follow(path, wake))
        end = asyncio.create_task(ends())
        end.add_done_callback(lambda _: wake.set())
        stack.callback(end.cancel)
        yield FollowedLog(log, end)


def _event(text: str, *, is_first: bool = False) -> bytes:
    data = orjson.dumps({"text": text, "is_first": is_first})
    return b"event: log\ndata: " + data + b"\n\n"
