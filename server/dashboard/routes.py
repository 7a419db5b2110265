# SPDX-License-Identifier: Apache-2.0
"""The dashboard's routes: its page and files, signing in, the stream.

Files and stream are compressed. Neither has a secret that its length could tell of: the key of a
session is in the answer alone that begins it, which is not compressed.
The headers keep the page to itself: nothing from elsewhere, nothing inline, in no frame.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from ...requests_db.records import Json
from ..api.browser_sessions import LINK_SECONDS, BrowserSessions
from ..api.dependencies import Dependencies, Injected
from ..api.security import PAGE, PAGE_FILES, SIGN_IN
from ..errors import NotFound, Unauthorized
from .feed import Feed
from .followed_log import open_log
from .memory import MemoryHistory
from .page_files import INDEX, Page
from .sources import make_sources

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# Of the stream: level, window and memory of zlib, with which a viewer costs 24 kB and a snapshot of
# 113 kB becomes 13.
_LEVEL, _WINDOW_BITS, _MEMORY_LEVEL = 3, 13, 4
_GZIP = 16  # added to the window: zlib then writes the format of gzip
_VARIES = {"Vary": "Accept-Encoding"}
_VERSION = re.compile(r"^[0-9a-f]{16}/")
_KEPT = "public, max-age=31536000, immutable"

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

router = APIRouter(prefix="/v1/dashboard")
pages = APIRouter(include_in_schema=False)


def add_dashboard(app: FastAPI, deps: Dependencies, sessions: BrowserSessions) -> MemoryHistory:
    """Add the dashboard to the daemon's application; returns what is to measure memory."""
    memory = MemoryHistory(deps)
    app.state.browser_sessions = sessions
    app.state.dashboard_page = page_files = Page()
    app.state.dashboard_feed = Feed(deps, partial(make_sources, deps, memory, page_files))
    app.include_router(router)
    app.include_router(pages)
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


@router.get("/stream")
async def stream(
    request: Request,
    deps: Injected,
    log: LogName = None,
    place: LogPlace = "",
    is_look: IsLook = False,
) -> StreamingResponse:
    """Server-sent events of all that the dashboard shows: `snapshot`, each `change`, and `log`."""
    feed: Feed = request.app.state.dashboard_feed
    log_of = None if log is None else partial(open_log, deps, log, place)
    messages = feed.messages(log_of, is_look=is_look)
    headers = {"Cache-Control": "no-store", **_VARIES}
    if _takes_gzip(request):
        messages, headers["Content-Encoding"] = _compressed(messages), "gzip"
    return StreamingResponse(messages, media_type="text/event-stream", headers=headers)


async def _compressed(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Compress each message so that the browser can read it at once."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS + _GZIP, _MEMORY_LEVEL)
    async for message in messages:
        yield packer.compress(message) + packer.flush(zlib.Z_SYNC_FLUSH)


def _takes_gzip(request: Request) -> bool:
    taken = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
    weights = dict(each.partition(";")[::2] for each in taken)
    return not re.fullmatch(r"q=0(\.0*)?", weights.get("gzip", "q=0"))


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
    return await _file(INDEX, request)


@pages.get(PAGE_FILES + "{name:path}")
async def page_file(name: str, request: Request) -> Response:
    """A script or a style of the page."""
    return await _file(name, request)


async def _file(path: str, request: Request) -> Response:
    page: Page = request.app.state.dashboard_page
    page_files = await page.files()
    name = _VERSION.sub("", path)
    found = page_files.files.get(name)
    if found is None:
        raise NotFound(f"the dashboard has no file {name!r}")
    is_kept = path == f"{page_files.version}/{name}"
    headers = {**SECURITY_HEADERS, **_VARIES, "ETag": found.tag}
    headers["Cache-Control"] = _KEPT if is_kept else "no-cache"
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    if not _takes_gzip(request):
        content = gzip.decompress(found.content)
        return Response(content, media_type=found.media_type, headers=headers)
    headers["Content-Encoding"] = "gzip"
    return Response(found.content, media_type=found.media_type, headers=headers)


def _sessions(request: Request) -> BrowserSessions:
    sessions: BrowserSessions = request.app.state.browser_sessions
    return sessions
