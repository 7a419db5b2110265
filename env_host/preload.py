# SPDX-License-Identifier: Apache-2.0
"""Imports the modules that serve sessions, for the fork server, which forks env hosts.

Importing them starts no thread and makes no loop. A module that is missing here costs each host a
copy of its own, and is no fault otherwise.
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
    "openenvd.env_host.shard.shard",
    "openenvd.env_host.startup",
    "openenvd.env_host.supervisor.supervisor",
)


def preload() -> None:
    """Import each module on its own: one that is not installed must not keep out the others."""
    for module in MODULES:
        with suppress(ImportError):
            importlib.import_module(module)


preload()
