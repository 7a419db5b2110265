# SPDX-License-Identifier: Apache-2.0
"""`FollowedLog`: the log that a page shows, on the page's one stream.

    open_log(deps, "requests/ID")        what a request printed, until it is final
    open_log(deps, "environments/NAME")  what the youngest replica prints; when it no longer serves,
                                         the log of the replica that is then the youngest

The log begins with its last lines, and continues as lines are written (`events.py`). A page that
comes back states its last offset, and is sent the text after it. If there is too much text to send,
the log begins again with the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi.sse import ServerSentEvent

from ..api.dependencies import Dependencies
from ..api.routes_environments import POLL_INTERVAL_SECONDS, shown_log
from ..api.streams import request_ends, sse
from ..errors import ApiError
from ..events import LogFile, followed, offset_of_last_lines

FIRST_LINES = 5000
MAX_BEHIND_BYTES = 8_000_000  # the most that is sent at once; of more, only the newest


class FollowedLog:
    """One log, as events of the stream; until `show`, there is no file.

    Args:
        end: Done when nothing more is written.
        place: `FILE:OFFSET` of the last event that the page has received; empty if none.
    """

    def __init__(self, end: asyncio.Future[Any], place: str = "") -> None:
        self._log: LogFile | None = None
        self._end = end
        self._had, _, offset = place.rpartition(":")
        self._had_to = int(offset or 0)
        self._is_first = not self._had

    @property
    def file(self) -> str:
        """The name of the shown file, or of the one that the page had before it came back."""
        return self._log.path.name if self._log else self._had

    async def show(self, path: Path, lines: int) -> None:
        """Continue in this file, or begin with its last lines."""
        offset = await asyncio.to_thread(offset_of_last_lines, path, lines)
        self._is_first = self.file != path.name or self._had_to < offset
        self._log = LogFile(path, offset if self._is_first else self._had_to)

    def messages(self) -> Iterator[ServerSentEvent]:
        """Yield what was written since the last call, in whole lines; at the end, all of it.

        The first event has `is_first`: the page must discard its earlier text.
        """
        log = self._log
        if log is not None and log.skip(MAX_BEHIND_BYTES):
            self._is_first = True
        if self._is_first:
            self._is_first = False
            yield _event("", log, is_first=True)
        if log is not None:
            is_over = self._end.done()
            for text in log.pieces(final=is_over):
                yield _event(text, log)


@asynccontextmanager
async def open_log(
    deps: Dependencies, name: str, place: str, wake: asyncio.Event
) -> AsyncIterator[FollowedLog]:
    """Open the log `requests/ID` or `environments/NAME`; set `wake` when there is more of it.

    It is empty if the request is unknown, or the environment has printed nothing. For `place` see
    `FollowedLog`.
    """
    kind, _, key = name.partition("/")
    async with AsyncExitStack() as stack:
        ends: Callable[[], Coroutine[Any, Any, object]] = deps.stopping.wait
        path = None
        with suppress(ApiError):
            if kind == "requests":
                request = await deps.submitter.find(key)
                path = deps.paths.request_log(request.id)
                ends = partial(request_ends, deps, request)
        end = asyncio.create_task(ends())
        end.add_done_callback(lambda _: wake.set())
        stack.callback(end.cancel)
        log = FollowedLog(end, place)
        if path is not None:
            await log.show(path, FIRST_LINES)
            stack.enter_context(followed(path, wake))
        elif kind == "environments":
            opened = asyncio.Event()
            showing = asyncio.create_task(_show_what_serves(deps, key, log, wake, opened))
            stack.callback(showing.cancel)
            await opened.wait()
        yield log


async def _show_what_serves(
    deps: Dependencies, name: str, log: FollowedLog, wake: asyncio.Event, opened: asyncio.Event
) -> None:
    """Follow the log of a serving replica, and of another one when it stops serving."""
    path: Path | None = None
    with ExitStack() as following:
        while True:
            try:
                with suppress(ApiError):
                    environment = await deps.submitter.environment(name)
                    found = await shown_log(deps, environment, log.file)
                    if found is not None and found != path:
                        path = found
                        await log.show(path, FIRST_LINES)
                        following.close()
                        following.enter_context(followed(path, wake))
                        wake.set()
            finally:
                opened.set()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def _event(text: str, log: LogFile | None, *, is_first: bool = False) -> ServerSentEvent:
    place = f"{log.path.name}:{log.offset}" if log else ""
    return sse("log", {"text": text, "is_first": is_first, "place": place})
