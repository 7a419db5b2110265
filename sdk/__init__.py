# SPDX-License-Identifier: Apache-2.0
"""The Python SDK: what `openenv` does on the command line, as typed objects.

    from openenvd import Client

    client = Client()                                       # starts the daemon when none is running
    env = client.launch("echo", replicas=2).wait()          # an Environment, once it is ready
    with env.connect() as session:
        print(session.reset().observation)
        print(session.step({"message": "hello"}).reward)
    for progress in client.rollout(env, out="episodes", episodes=64):
        print(progress.message)
    env.down().wait()

Where to look:

    client.py        `Client`: launches, rollouts, and what there is
    handles.py       `Request` and `Environment`: one of each, by its id or name
    asynchronous.py  `AsyncClient`, `AsyncRequest`, `AsyncEnvironment`: the same for asyncio
    session.py       `Session` and `AsyncSession`, where OpenEnv's own client is not installed
    pytest_plugin.py the fixtures `openenv_env` and `openenv_session`
    options.py       the options of launches and rollouts as keyword arguments; generated

Everything goes through `openenvd.client`, which starts and finds the daemon, and whose errors
(`openenvd.client.errors`) are raised as they are. Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..client.errors import SessionError as SessionError
    from .asynchronous import AsyncClient as AsyncClient
    from .asynchronous import AsyncEnvironment as AsyncEnvironment
    from .asynchronous import AsyncRequest as AsyncRequest
    from .client import Client as Client
    from .handles import Environment as Environment
    from .handles import Progress as Progress
    from .handles import Request as Request
    from .session import AsyncSession as AsyncSession
    from .session import Session as Session
    from .session import StepResult as StepResult

_PUBLIC = {
    "AsyncClient": "asynchronous",
    "AsyncEnvironment": "asynchronous",
    "AsyncRequest": "asynchronous",
    "AsyncSession": "session",
    "Client": "client",
    "Environment": "handles",
    "Progress": "handles",
    "Request": "handles",
    "Session": "session",
    "SessionError": "session",
    "StepResult": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
