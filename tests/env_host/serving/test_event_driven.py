# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server without ticks, over a real socket."""

from __future__ import annotations

import asyncio
import socket
import time
from email.utils import parsedate_to_datetime
from typing import Any

from uvicorn.config import Config

from openenvd.env_host.serving.event_driven import EventDrivenServer


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def server_of() -> EventDrivenServer:
    config = Config(
        answer,
        lifespan="off",
        ws="none",
        log_config=None,
        server_header=False,
        headers=[("x-served-by", "ours")],
    )
    return EventDrivenServer(config)


async def test_it_answers_with_the_date_and_ends_when_asked_to() -> None:
    server = server_of()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        began = int(time.time())
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        lines = (await reader.read()).decode().lower().split("\r\n")
        writer.close()
        server.request_exit()
        await serving
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    assert headers["x-served-by"] == "ours"
    assert began <= parsedate_to_datetime(headers["date"]).timestamp() <= time.time()


async def test_it_ends_at_once_when_it_was_asked_to_before_it_began() -> None:
    server = server_of()
    server.request_exit()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.serve(sockets=[listener])
