# SPDX-License-Identifier: Apache-2.0
"""Talks to the daemon, with the standard library alone.

    from openenvd.client import connect, run

    client = connect()                                   # starts the daemon when none is running
    request = run(client, "launch", {"source": "echo"})
    print(request["result"]["environment"]["address"])

Where to look:

    http.py       one call over the Unix socket: JSON, text, server-sent events
    api.py        `DaemonClient`: the API's calls by name
    following.py  follows one request to its end, across lost connections
    daemon.py     finds the daemon, starts one, stops it
    sources.py    what the source of a launch means, seen from a folder
    policies.py   what a policy behind a chat endpoint needs of the variables here
    upstream.py   `OpenEnvdProvider`, for upstream's `EnvClient.from_env(…, provider=…)`
    health.py     a program for probes: whether a daemon answers; it starts none
    errors.py     what can go wrong

JSON stays JSON here: `cli` and programs read it as documented in `docs/api.md`. Names are resolved
on first use, so that each command pays for what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import DaemonClient as DaemonClient
    from .daemon import connect as connect
    from .following import follow as follow
    from .following import run as run
    from .upstream import OpenEnvdProvider as OpenEnvdProvider

_PUBLIC = {
    "DaemonClient": "api",
    "OpenEnvdProvider": "upstream",
    "connect": "daemon",
    "follow": "following",
    "run": "following",
}

__all__ = ["DaemonClient", "OpenEnvdProvider", "connect", "follow", "run"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
