# SPDX-License-Identifier: Apache-2.0
"""The dashboard's routes: its page and files, signing in, the stream.

Files and stream are compressed. Neither has a secret that its length could tell of: the key of a
session is in the answer alone that begins it, which is not compressed, as it is short.
The headers keep the page to itself: nothing from elsewhere, nothing inline, in no frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field
from starlette.middleware import Middleware

from ...system.text.json_lines import Json
from ..api.dependencies import Dependencies, Injected
from ..api.security import LINK_SECONDS, PAGE, PAGE_FILES, SIGN_IN, BrowserSessions
from ..errors import Unauthorized
from .followed_log import open_log
from .live_state import Feed
from .memory import MemoryHistory
from .page_files import INDEX, SECURITY_HEADERS, Compressed, PageFiles, version_of_files
from .sources import make_sources

LogName = Annotated[
    str | None,
    Query(pattern="^(requests|environments)/", max_length=300, description="A log to follow."),
]
LogPlace = Annotated[
    str,
    Query(
        pattern=r"^(.+:[0-9]{1,18})?$",
        max_length=300,
        description="The `place` of the last event of this log that was read: what came after it.",
    ),
]
IsLook = Annotated[
    bool, Query(description="End with the snapshot, and what there is of the log by then.")
]

PREFIX = "/v1/dashboard"
router = APIRouter(prefix=PREFIX)
pages = APIRouter(include_in_schema=False)


def add_dashboard(app: FastAPI, deps: Dependencies, sessions: BrowserSessions) -> MemoryHistory:
    """Add the dashboard to the daemon's application; returns what is to measure memory."""
    memory = MemoryHistory(deps)
    app.state.browser_sessions = sessions
    app.state.dashboard_page = PageFiles()
    sources = partial(make_sources, deps, memory, version_of_files())
    app.state.dashboard_feed = Feed(deps, sources)
    # The innermost, behind the guard.
    app.user_middleware.append(Middleware(Compressed, paths=(PAGE_FILES, PREFIX)))
    app.include_router(router)
    app.include_router(pages)
    app.mount(PAGE_FILES, app.state.dashboard_page)
    return memory


class Code(BaseModel):
    """What a page signs in with."""

    code: str = Field(max_length=100, description="Of a link that was not used.")


@router.post("/link")
async def new_link(request: Request, deps: Injected) -> Json:
    """A link that signs a browser in, once."""
    code = _sessions(request).new_code()
    address = deps.identity["address"]
    return {"address": address, "url": f"{address}/#{code}", "expires_seconds": LINK_SECONDS}


@router.get("/stream", response_class=EventSourceResponse)
async def stream(
    request: Request,
    deps: Injected,
    log: LogName = None,
    place: LogPlace = "",
    is_look: IsLook = False,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of all that the dashboard shows: `snapshot`, each `change`, and `log`."""
    feed: Feed = request.app.state.dashboard_feed
    log_of = None if log is None else partial(open_log, deps, log, place)
    async for message in feed.messages(log_of, is_look=is_look):
        yield message


@pages.post(SIGN_IN)
async def sign_in(code: Code, request: Request, deps: Injected) -> Response:
    """Begin a session: the cookie, and the key that the page keeps."""
    session = _sessions(request).begin(code.code)
    if session is None:
        raise Unauthorized(
            "this link was used already, or is too old", "openenv dashboard makes another"
        )
    await asyncio.to_thread(deps.paths.sign_in_page.unlink, missing_ok=True)  # it has done its work
    headers = {**SECURITY_HEADERS, "Set-Cookie": session.cookie, "Cache-Control": "no-store"}
    return JSONResponse({"key": session.key}, headers=headers)


@pages.get(PAGE)
@pages.head(PAGE)
async def page(request: Request) -> Response:
    """The page itself."""
    page_files: PageFiles = request.app.state.dashboard_page
    return await page_files.get_response(INDEX, request.scope)


def _sessions(request: Request) -> BrowserSessions:
    sessions: BrowserSessions = request.app.state.browser_sessions
    return sessions
