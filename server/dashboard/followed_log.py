# SPDX-License-Identifier: Apache-2.0
"""`FollowedLog`: the log that a page shows, on the page's one stream.

    open_log(deps, "requests/ID")        what a request printed, until it is final
    open_log(deps, "environments/NAME")  what the youngest replica prints, and when that serves no
                                         more, what the youngest prints then

It begins with the last lines, and continues as they are written (`events.py`). A page that
comes back says up to where it has it, and is sent what is new. When more is written than a page can
be sent, it begins again with the newest.
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
MAX_BEHIND_BYTES = 8_000_000  # that a viewer is sent at once; of more, the newest alone


class FollowedLog:
    """One log, as events of the stream; at first none.

    Args:
        end: Done when nothing more is written.
        place: Of the last event that the page has had, `FILE:OFFSET`; empty: it has had none.
    """

    def __init__(self, end: asyncio.Future[Any], place: str = "") -> None:
        self._log: LogFile | None = None
        self._end = end
        self._had, _, offset = place.rpartition(":")
        self._had_to = int(offset or 0)
        self._is_first = not self._had

    @property
    def file(self) -> str:
        """The name of the file that is shown, or was when the page was here last."""
        return self._log.path.name if self._log else self._had

    async def show(self, path: Path, lines: int) -> None:
        """Go on in this file, or begin with its last lines."""
        offset = await asyncio.to_thread(offset_of_last_lines, path, lines)
        self._is_first = self.file != path.name or self._had_to < offset
        self._log = LogFile(path, offset if self._is_first else self._had_to)

    def messages(self) -> Iterator[ServerSentEvent]:
        """Yield what was written since the last call, in whole lines; at the end, all of it.

        The first event says that the text begins with it.
        """
        log = self._log
        if log is not None and log.size() - log.offset > MAX_BEHIND_BYTES:
            log.skip_to(log.size() - MAX_BEHIND_BYTES)
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
    """Open a log, and set `wake` when there is more of it.

    Args:
        deps: The daemon's parts.
        name: Of a request that is not known, or an environment that has printed nothing, it is
            empty: the page learns of that elsewhere.
        place: As of `FollowedLog`.
        wake: Set on the loop.
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
