# SPDX-License-Identifier: Apache-2.0
"""The dashboard's routes: its page and files, signing in, the stream.

Files are read when they are asked for, and carry their hash: a browser that has them is told so.
The headers keep the page to itself: nothing from elsewhere, nothing inline, in no frame.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from ...requests_db.records import Json
from ..api.browser_sessions import LINK_SECONDS, BrowserSessions
from ..api.dependencies import Dependencies, Injected
from ..api.security import PAGE, PAGE_FILES, SIGN_IN
from ..errors import NotFound, Unauthorized
from .feed import Feed
from .memory import MemoryHistory
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
_FILES = files(__package__) / "static"
_INDEX = "index.html"

router = APIRouter(prefix="/v1/dashboard")
pages = APIRouter(include_in_schema=False)


def add_dashboard(app: FastAPI, deps: Dependencies, sessions: BrowserSessions) -> MemoryHistory:
    """Add the dashboard to the daemon's application; returns what is to measure memory."""
    memory = MemoryHistory(deps)
    app.state.browser_sessions = sessions
    app.state.dashboard_feed = Feed(deps, partial(make_sources, deps, memory))
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
async def stream(request: Request) -> StreamingResponse:
    """Server-sent events of all that the dashboard shows: `snapshot`, then each `change`."""
    feed: Feed = request.app.state.dashboard_feed
    return StreamingResponse(
        feed.messages(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


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
    return await _file(_INDEX, request)


@pages.get(PAGE_FILES + "{name:path}")
async def page_file(name: str, request: Request) -> Response:
    """A script or a style of the page."""
    return await _file(name, request)


async def _file(name: str, request: Request) -> Response:
    found = await asyncio.to_thread(_content, name)
    if found is None:
        raise NotFound(f"the dashboard has no file {name!r}")
    content, tag = found
    headers = {**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    media_type = mimetypes.guess_type(name)[0]
    return Response(content, media_type=media_type, headers=headers)


@lru_cache(1)
def _names() -> frozenset[str]:
    """The files there are: nothing else is opened, whatever a path says."""

    def below(folder: Any, prefix: str) -> list[str]:
        found: list[str] = []
        for entry in folder.iterdir():
            name = prefix + entry.name
            found += below(entry, f"{name}/") if entry.is_dir() else [name]
        return found

    return frozenset(below(_FILES, ""))


def _content(name: str) -> tuple[bytes, str] | None:
    if name not in _names():
        return None
    content = _FILES.joinpath(*name.split("/")).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def _sessions(request: Request) -> BrowserSessions:
    sessions: BrowserSessions = request.app.state.browser_sessions
    return sessions
