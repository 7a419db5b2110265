# SPDX-License-Identifier: Apache-2.0
"""The dashboard's routes: its page and files, signing in, the stream.

The headers isolate the page: nothing is loaded from elsewhere, nothing inline, and in no frame.

Starlette serves the files. A browser caches them, and asks each time whether they are current
(`ETag`). The stream carries the mark of the daemon's installation, so that a page of another one
reloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Body, FastAPI, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ...environments.sources.resolve import bundled
from ...requests_db.sql import queries
from ...schema.states import RequestState
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials
from ..api.dependencies import Dependencies, Injected
from ..api.routes_environments import base_url
from ..api.security import LINK_SECONDS, PAGE, PAGE_FILES, SIGN_IN, BrowserSessions
from ..errors import NotFound, QueueFull, Unauthorized
from .environments import EnvironmentSource, Faults
from .live_state import Feed
from .memory import MachineSource, MemoryHistory
from .requests import RequestSource, RolloutSource

MAX_LAUNCHES = 50  # among which recent folders are looked for
MAX_RECENT = 8
INDEX = "index.html"
FOLDER = Path(__file__).with_name("static")
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


class PageFiles(StaticFiles):
    """The page's files, with the headers that isolate the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Answer with a file, or 304 if the browser has it."""
        response = await super().get_response(path, scope)
        response.headers.update({**SECURITY_HEADERS, "Cache-Control": "no-cache"})
        return response


MAX_PLAYERS = 8
ENDED = "this play has ended: nothing was done for 15 minutes", "a reset begins another"


@dataclass
class _Player:
    process: Process
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time

    async def ask(self, call: Json) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self.turn:
            try:
                self.process.stdin.write(orjson.dumps(call) + b"\n")
                size = int(await self.process.stdout.readline())
                return await self.process.stdout.readexactly(size)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                raise NotFound(*ENDED) from None


class Players:
    """The processes of all pages that play an environment, by an id that the page has chosen.

    One ends when its page is closed, after 15 minutes without a call, and with the daemon, since
    its input ends.
    """

    def __init__(self) -> None:
        self._players: dict[str, _Player] = {}

    async def ask(self, player_id: str, call: Json) -> bytes:
        """Return the answer to a call as JSON; `begin` starts the process.

        Raises:
            NotFound: The process has ended.
            QueueFull: Too many pages play.
        """
        if call["call"] == "begin":
            self.end(player_id)
            running = {i: p for i, p in self._players.items() if p.process.returncode is None}
            self._players = running
            if len(running) >= MAX_PLAYERS:
                raise QueueFull(f"{MAX_PLAYERS} pages play already", "close one of them")
            program = [sys.executable, "-P", "-m", "openenvd.rollouts.play"]
            made = asyncio.create_subprocess_exec(*program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            running[player_id] = _Player(await made)
        if (player := self._players.get(player_id)) is None:
            raise NotFound(*ENDED)
        return await player.ask(call)

    def end(self, player_id: str) -> None:
        """End a process, and so its session."""
        if (player := self._players.pop(player_id, None)) is not None:
            with contextlib.suppress(ProcessLookupError):
                player.process.kill()


LogName = Annotated[str | None, Query(pattern="^(requests|environments)/", max_length=300)]
LogPlace = Annotated[str, Query(pattern=r"^(.+:[0-9]{1,18})?$", max_length=300)]
PlayerId = Annotated[str, PathParameter(pattern="^[0-9a-f]{32}$", description="Of the page.")]
Folder = Annotated[str | None, Query(max_length=4096)]
Code = Annotated[str, Body(embed=True, max_length=100, description="Of a link that was not used.")]
SeenIds = Annotated[list[str], Body(embed=True, max_length=500, description="Of faults: `ids`.")]

PREFIX = "/v1/dashboard"
router = APIRouter(prefix=PREFIX)
pages = APIRouter(include_in_schema=False)


def add_dashboard(app: FastAPI, deps: Dependencies, sessions: BrowserSessions) -> MemoryHistory:
    """Add the dashboard to the daemon's application; returns what is to measure memory."""
    memory = MemoryHistory(deps)
    app.state.browser_sessions = sessions
    app.state.dashboard_page = PageFiles(directory=FOLDER)
    app.state.dashboard_folder = str(Path.home())  # of the user who last requested a link
    app.state.dashboard_faults = faults = Faults(deps.paths.home / "seen_faults.json")
    app.state.dashboard_players = Players()

    app.state.dashboard_feed = Feed(
        deps,
        lambda: (  # the sources, which live while a page is open
            MachineSource(deps, memory),
            EnvironmentSource(deps, memory, faults),
            RequestSource(deps, faults),
            RolloutSource(deps),
        ),
    )
    app.include_router(router)
    app.include_router(pages)
    app.mount(PAGE_FILES, app.state.dashboard_page)
    return memory


@router.post("/link")
async def new_link(request: Request, deps: Injected, folder: Folder = None) -> Json:
    """A link that signs a browser in, once. Relative paths of the launch form begin in `folder`."""
    request.app.state.dashboard_folder = folder or request.app.state.dashboard_folder
    code = _sessions(request).new_code()
    address = deps.identity["address"]
    return {"address": address, "url": f"{address}/#{code}", "expires_seconds": LINK_SECONDS}


@router.get("/sources")
async def sources(request: Request, deps: Injected) -> Json:
    """Return the sources for the launch form: bundled, launched lately, the user's folder."""
    names = list(bundled())
    launches = await deps.store.read(queries.list_requests(operation="launch", limit=MAX_LAUNCHES))
    recent: dict[Path, Json] = {}  # by its place, the newest first
    for launch in launches:
        source, cwd = hide_credentials(launch.payload["source"]), launch.payload.get("cwd") or ""
        if launch.payload["source"] not in names and launch.state is not RequestState.FAILED:
            recent.setdefault(Path(cwd, source), {"source": source, "cwd": cwd})
    offered = [*recent.values()][:MAX_RECENT]
    return {"bundled": names, "recent": offered, "folder": request.app.state.dashboard_folder}


@router.get("/paths")
async def paths(source: str = "", cwd: str = "") -> Json:
    """Expand what was typed as a shell does: `~`, variables and quotes."""
    return {"source": as_a_shell_reads(source), "cwd": as_a_shell_reads(cwd)}


def as_a_shell_reads(typed: str) -> str:
    """Return the word that a shell passes on; what is no single word stays as it is."""
    with contextlib.suppress(ValueError):  # a quote that does not end
        words = shlex.split(typed)
        if len(words) == 1:
            return os.path.expandvars(os.path.expanduser(words[0]))  # noqa: PTH111  never raises
    return typed


@router.post("/seen", status_code=204)
async def see(ids: SeenIds, request: Request) -> None:
    """Mark faults as seen, in all windows."""
    faults: Faults = request.app.state.dashboard_faults
    await asyncio.to_thread(faults.see, ids)


class Call(BaseModel):
    """A call of a page that plays an environment; see `rollouts.play`."""

    call: Literal["begin", "reset", "step", "random", "state", "save"]
    data: dict[str, Any] = Field(default={}, description="Of `begin`: the environment's name.")


@router.post("/play/{player_id}")
async def play(player_id: PlayerId, call: Call, request: Request, deps: Injected) -> Response:
    """Reset, step, or save what was played; the answer may be an error of the environment."""
    players: Players = request.app.state.dashboard_players
    data = call.data
    if call.call == "begin":
        name = str(data.get("environment"))
        served = await base_url(name, deps)
        source = (await deps.submitter.environment(name)).spec["source"]
        data = {"address": served["base_url"], "environment": name, "source": source}
    elif call.call == "save":
        typed = as_a_shell_reads(str(data.get("path")))
        path = str(Path(request.app.state.dashboard_folder, typed))
        data = {"path": path, "number": data.get("episode", -1)}
    answer = await players.ask(player_id, {"call": call.call, "data": data})
    return Response(answer, media_type="application/json")


@router.delete("/play/{player_id}", status_code=204)
async def end_play(player_id: PlayerId, request: Request) -> None:
    """End the session."""
    request.app.state.dashboard_players.end(player_id)


@router.get("/stream", response_class=EventSourceResponse)
async def stream(
    request: Request,
    deps: Injected,
    log: LogName = None,
    place: LogPlace = "",
    is_look: bool = False,
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events of all that the dashboard shows: `snapshot`, each `change`, and `log`.

    `log` is the log to follow, `place` that of its last event that was read. With `is_look`, the
    stream ends after the snapshot and what the log has by then.
    """
    feed: Feed = request.app.state.dashboard_feed
    async for message in feed.messages(log, place, is_look=is_look):
        yield message


@pages.post(SIGN_IN)
async def sign_in(code: Code, request: Request, deps: Injected) -> Response:
    """Begin a session: the cookie, and the key that the page keeps."""
    session = _sessions(request).begin(code)
    if session is None:
        raise Unauthorized(
            "this link was used already, or is too old", "openenv dashboard makes another"
        )
    await asyncio.to_thread(deps.paths.sign_in_page.unlink, missing_ok=True)  # it has done its work
    cookie, key = session
    headers = {**SECURITY_HEADERS, "Set-Cookie": cookie, "Cache-Control": "no-store"}
    return JSONResponse({"key": key}, headers=headers)


@pages.get(PAGE)
@pages.head(PAGE)
async def page(request: Request) -> Response:
    """The page itself."""
    page_files: PageFiles = request.app.state.dashboard_page
    return await page_files.get_response(INDEX, request.scope)


def _sessions(request: Request) -> BrowserSessions:
    sessions: BrowserSessions = request.app.state.browser_sessions
    return sessions
