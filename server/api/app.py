# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application: what it is made of, and how errors leave it.

Handlers are thin: they parse, call `Submitter`, `Reconciler` or the store, and render through
`views.py`. Everything they need is one `Dependencies` value (`dependencies.py`).
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ...requests_db.errors import DatabaseError
from ...system.process.loop_lag import EventLoopLagMonitor
from ..errors import ApiError, StorageFailed
from . import (
    routes_daemon,
    routes_environments,
    routes_requests,
    routes_rollouts,
)
from .dependencies import Dependencies
from .routes_requests import invalid_of


def create_app(deps: Dependencies) -> FastAPI:
    """Make the application, which belongs behind the guard (`security.py`)."""
    app = FastAPI(
        title="openenvd",
        version=deps.identity["version"],
        summary="Queue operations on OpenEnv environments, and watch them.",
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,  # an empty name is no request for the list
        telemetry=_telemetry(deps),
    )
    app.state.deps = deps
    app.add_middleware(LagSampling, lag=deps.lag)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(DatabaseError, _answer_database_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_defect)
    for routes in (
        routes_requests,
        routes_environments,
        routes_rollouts,
        routes_daemon,
    ):
        app.include_router(routes.router, prefix="/v1")
    app.include_router(routes_daemon.root)
    return app


def _telemetry(deps: Dependencies) -> TelemetryConfig:
    """A span for each call that changes something, where traces are on: all those by POST."""
    config: TelemetryConfig = {
        "auto_configure": False,
        "metrics": False,
        "logs": False,
        "operation_spans": False,
        "tracing": deps.traces is not None,
        "exclude": lambda scope: scope.get("method") != "POST",
    }
    if deps.traces is not None:
        config["tracer_provider"] = deps.traces.provider
    return config


class LagSampling:
    """ASGI middleware: the loop's lag is sampled while a call waits for its answer."""

    def __init__(self, app: ASGIApp, lag: EventLoopLagMonitor) -> None:
        self._app = app
        self._lag = lag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the call as work under way."""
        with self._lag.watching():
            await self._app(scope, receive, send)


async def _answer_api_error(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, ApiError)
    return JSONResponse(exc.to_json(), exc.status)


async def _answer_validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return await _answer_api_error(request, invalid_of(exc.errors()[0]))


async def _answer_database_error(request: Request, exc: Exception) -> JSONResponse:
    hint = getattr(exc, "hint", None)
    return await _answer_api_error(request, StorageFailed(str(exc), hint))


async def _answer_http_error(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    kind = "not_found" if exc.status_code == 404 else "http"
    error = {"kind": kind, "message": str(exc.detail), "hint": None}
    return JSONResponse({"error": error}, exc.status_code)


async def _answer_defect(_request: Request, exc: Exception) -> JSONResponse:
    """Answer a defect of the daemon; its traceback is in the daemon's log."""
    error = ApiError(
        f"the daemon failed to handle this call: {type(exc).__name__}: {exc}",
        "its log has the traceback: daemon.log in its home folder",
    )
    return JSONResponse(error.to_json(), error.status)
