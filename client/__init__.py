# SPDX-License-Identifier: Apache-2.0
"""The SDK for users: typed objects, and below them the calls to the daemon.

    synchronous.py   `Client`: launches, rollouts, lists of environments and requests
    handles.py       `Request` and `Environment`
    asynchronous.py  `AsyncClient`, `AsyncRequest`, `AsyncEnvironment`: the same for asyncio
    session.py       `Session` and `AsyncSession`, which need no OpenEnv client
    pytest_plugin.py the fixtures `openenv_env` and `openenv_session`
    options.py       the options of launches and rollouts as keyword arguments; generated
    upstream.py      `OpenEnvdProvider`, for upstream's `EnvClient.from_env(…, provider=…)`

and below them, with the standard library alone and JSON as documented in `docs/api.md`:

    http.py       one call over the Unix socket: JSON, text, server-sent events
    api.py        `DaemonClient`: the API's calls by name
    following.py  follows one request to its end, across lost connections
    daemon.py     finds, starts and stops the daemon; as a program: tells whether it answers
    sources.py    resolves the source of a launch in a folder; the payload of a rollout
    errors.py     the errors

Names are resolved on first use, so that each command imports only what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import DaemonClient as DaemonClient
    from .asynchronous import AsyncClient as AsyncClient
    from .asynchronous import AsyncEnvironment as AsyncEnvironment
    from .asynchronous import AsyncRequest as AsyncRequest
    from .daemon import connect as connect
    from .errors import SessionError as SessionError
    from .following import follow as follow
    from .following import run as run
    from .handles import Environment as Environment
    from .handles import Progress as Progress
    from .handles import Request as Request
    from .session import AsyncSession as AsyncSession
    from .session import Checkpoint as Checkpoint
    from .session import Session as Session
    from .session import StepResult as StepResult
    from .synchronous import Client as Client
    from .upstream import OpenEnvdProvider as OpenEnvdProvider

_PUBLIC = {
    **dict.fromkeys(("AsyncClient", "AsyncEnvironment", "AsyncRequest"), "asynchronous"),
    **dict.fromkeys(
        ("AsyncSession", "Checkpoint", "Session", "SessionError", "StepResult"), "session"
    ),
    **dict.fromkeys(("Environment", "Progress", "Request"), "handles"),
    **dict.fromkeys(("follow", "run"), "following"),
    "Client": "synchronous",
    "DaemonClient": "api",
    "OpenEnvdProvider": "upstream",
    "connect": "daemon",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
