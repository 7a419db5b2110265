# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application: what it is made of, and how errors leave it.

Handlers are thin: they parse, call `Submitter`, `Reconciler` or the store, and render through
`views.py`. Everything they need is one `Services` value, found on the application's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..executor import BurstableExecutor
from ..requests_db.async_store import AsyncStore
from ..requests_db.errors import DatabaseError
from .errors import ApiError, Invalid, StorageFailed
from .hub import EventHub
from .log_streams import LogWatcher
from .reconciler import Reconciler
from .security import Guard
from .settings import Paths, Settings
from .submission import Submitter


@dataclass(frozen=True)
class Services:
    """What the handlers work with."""

    paths: Paths
    settings: Settings
    identity: dict[str, Any]  # the contents of daemon.json
    limits: dict[str, Any]
    store: AsyncStore
    executor: BurstableExecutor
    reconciler: Reconciler
    submitter: Submitter
    hub: EventHub
    logs: LogWatcher
    stopping: asyncio.Event  # set when the daemon is to end: streams end with it
    stop: Callable[[], None]


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]


def create_app(services: Services, token: str) -> FastAPI:
    """The application, guarded by the token."""
    from . import routes_daemon, routes_environments, routes_requests

    app = FastAPI(
        title="openenvd",
        version=services.identity["version"],
        summary="Queue operations on OpenEnv environments, and watch them.",
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.services = services
    app.add_middleware(Guard, token=token)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(DatabaseError, _answer_database_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_defect)
    for routes in (routes_requests, routes_environments, routes_daemon):
        app.include_router(routes.router, prefix="/v1")
    app.include_router(routes_daemon.root)
    return app


async def _answer_api_error(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, ApiError)
    return JSONResponse(exc.to_json(), exc.status)


async def _answer_validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    # The body's path starts with `body`, the operation's tag, `payload`: noise to a reader.
    path = [str(part) for part in first["loc"][1:] if part != "payload"]
    field = ".".join(path[1:] if len(path) > 1 else path)
    why = first["msg"].removeprefix("Value error, ")
    message = f"{field}: {why}" if field else why
    return await _answer_api_error(
        request, Invalid(message, "GET /openapi.json shows every operation", field=field)
    )


async def _answer_database_error(request: Request, exc: Exception) -> JSONResponse:
    hint = getattr(exc, "hint", None)
    return await _answer_api_error(request, StorageFailed(str(exc), hint))


async def _answer_http_error(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    kind = "not_found" if exc.status_code == 404 else "http"
    error = {"kind": kind, "message": str(exc.detail), "hint": None}
    return JSONResponse({"error": error}, exc.status_code)


async def _answer_defect(_request: Request, exc: Exception) -> JSONResponse:
    """A defect of ours: told plainly, with its traceback in the daemon's log."""
    error = ApiError(
        f"the daemon failed at this call: {type(exc).__name__}: {exc}",
        "its log has the traceback: daemon.log in its home folder",
    )
    return JSONResponse(error.to_json(), error.status)
