# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server without ticks; every host of the tests serves, and ends, with it."""

from __future__ import annotations

import socket
from typing import Any

from uvicorn.config import Config

from openenvd.env_host.serving.event_driven import EventDrivenServer


async def never_called(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(scope)


async def test_it_ends_at_once_when_it_was_asked_to_before_it_began() -> None:
    server = EventDrivenServer(Config(never_called, lifespan="off", ws="none", log_config=None))
    server.request_exit()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.serve(sockets=[listener])
