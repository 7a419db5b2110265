# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application: its parts, and its answers to errors.

Handlers are thin: they parse, call `Submitter`, `Reconciler` or the store, and render through
`views.py`. Everything they need is one `Dependencies` value (`dependencies.py`).
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ...requests_db.errors import DatabaseError
from ...system.process.loop_lag import EventLoopLagMonitor
from ..errors import ApiError, StorageFailed
from . import routes_daemon, routes_environments, routes_requests, routes_rollouts
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
        telemetry={  # a span for each call that changes something (by POST), if traces are on
            "auto_configure": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "tracing": deps.submitter.traces.provider is not None,
            "tracer_provider": deps.submitter.traces.provider,
            "exclude": lambda scope: scope.get("method") != "POST",
        },
    )
    app.state.deps = deps
    app.add_middleware(_sampling, lag=deps.lag)
    for kind in (ApiError, RequestValidationError, DatabaseError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    for routes in (routes_requests, routes_environments, routes_rollouts, routes_daemon):
        app.include_router(routes.router, prefix="/v1")
    app.include_router(routes_daemon.root)
    return app


def _sampling(app: ASGIApp, lag: EventLoopLagMonitor) -> ASGIApp:
    """Make ASGI middleware that samples the loop's lag while a call waits for its answer."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        with lag.watching():
            await app(scope, receive, send)

    return call


async def _answer_error(_request: Request, exc: Exception) -> JSONResponse:
    match exc:
        case ApiError():
            error = exc
        case RequestValidationError():
            error = invalid_of(exc.errors()[0])
        case DatabaseError():
            error = StorageFailed(str(exc), exc.hint)
        case HTTPException():
            kind = "not_found" if exc.status_code == 404 else "http"
            answer = {"kind": kind, "message": str(exc.detail), "hint": None}
            return JSONResponse({"error": answer}, exc.status_code)
        case _:  # a defect of the daemon
            error = ApiError(
                f"the daemon failed to handle this call: {type(exc).__name__}: {exc}",
                "its log has the traceback: daemon.log in its home folder",
            )
    return JSONResponse(error.to_json(), error.status)
