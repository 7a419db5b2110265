# SPDX-License-Identifier: Apache-2.0
"""The files of the page, as Starlette serves and compresses them.

A browser keeps them, and asks each time whether it has the newest (`ETag`). `version_of_files` goes
out with the stream, so that a page of other files than the daemon's loads itself again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

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
_LEVEL = 3  # of zlib: 9 takes three times as long, and saves a tenth


class PageFiles(StaticFiles):
    """The page's files, with the headers that keep the page to itself."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Answer with a file, or that the browser has it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update({**SECURITY_HEADERS, "Cache-Control": "no-cache"})
        return response


class Compressed:
    """ASGI middleware: compresses the page, and answers below these paths, streams too."""

    def __init__(self, app: ASGIApp, paths: tuple[str, ...]) -> None:
        self._app = app
        self._paths = paths
        self._compressed = GZipMiddleware(app, compresslevel=_LEVEL, exclude_content_types=())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the call."""
        path = scope["path"] if scope["type"] == "http" else ""
        is_ours = path == "/" or path.startswith(self._paths)
        await (self._compressed if is_ours else self._app)(scope, receive, send)


def version_of_files() -> str:
    """Return what changes with any of the files."""
    files = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    known = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]
