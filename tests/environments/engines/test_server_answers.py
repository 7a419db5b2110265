# SPDX-License-Identifier: Apache-2.0
"""Questions to replicas' servers: what each answer means, and that none waits for another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from openenvd.environments.agent.instance import read_capacity, why_not_healthy
from openenvd.schema.errors import NotAnswering


@asynccontextmanager
async def serving(answer: bytes | None) -> AsyncIterator[str]:
    """Answer each request with these bytes, and close; None: answer nothing."""

    talks = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()  # until the client leaves
        else:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*filter(None, talks))


def response(status: str, body: str = "{}") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def test_servers_that_do_not_answer_delay_no_question_to_another() -> None:
    async with serving(None) as silent, serving(response("200 OK")) as healthy:
        waiting = [asyncio.create_task(why_not_healthy(silent, 60.0)) for _ in range(300)]
        assert await why_not_healthy(healthy) is None
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_silent_server_is_given_up_and_one_without_capacity_has_none() -> None:
    async with serving(None) as silent:
        assert "timed out" in str(await why_not_healthy(silent, 0.1))
    async with serving(None) as url:
        pass
    assert "nothing answers at" in str(await why_not_healthy(url))
    async with serving(response("404 Not Found")) as url:
        assert await read_capacity(url) is None
    async with serving(response("200 OK", '{"sessions": 3}')) as url:
        assert await read_capacity(url) == {"sessions": 3}
    async with serving(response("500 Oops")) as url:
        with pytest.raises(NotAnswering, match="500 Oops"):
            await read_capacity(url)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (response("200 OK"), None),
        (response("200 OK", "healthy"), "does not answer with JSON"),
        (response("503 Service Unavailable"), "/health answers 503 Service Unavailable"),
        (b"SSH-2.0-OpenSSH\r\n", "it is no HTTP server"),
        (b"", "it is no HTTP server"),
    ],
)
async def test_the_reason_is_told(answer: bytes, why: str | None) -> None:
    async with serving(answer) as url:
        found = await why_not_healthy(url)
        assert found is None if why is None else why in str(found)
