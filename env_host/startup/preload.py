# SPDX-License-Identifier: Apache-2.0
"""Imports what serves sessions, for a process that forks hosts (the fork server of bundled
environments and of classes in our own Python). Importing starts no thread and makes no loop.

What is missing here costs every host its own copy, and is no fault otherwise.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

MODULES = (
    "asyncio.runners",
    "concurrent.futures.thread",
    "encodings.ascii",
    "encodings.idna",
    "faulthandler",
    "httptools",
    "multiprocessing.resource_tracker",
    "orjson",
    "pydantic",
    "uuid",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "uvicorn.server",
    "uvloop",
    "openenvd.env_host.environment.definition",
    "openenvd.env_host.environment.interfaces",
    "openenvd.env_host.main",
    "openenvd.env_host.serving.app",
    "openenvd.env_host.serving.uvicorn_server",
    "openenvd.env_host.shard.isolated_session",
    "openenvd.env_host.shard.shard",
    "openenvd.env_host.supervisor.supervisor",
)


def preload() -> None:
    """Each on its own: one that is not installed must not keep out the others."""
    for module in MODULES:
        with suppress(ImportError):
            importlib.import_module(module)


preload()
