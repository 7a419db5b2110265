# SPDX-License-Identifier: Apache-2.0
"""Requests for an environment without a replica, as Envoy sends them to the daemon's socket."""

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openenvd.server.reconcile import held_requests
from openenvd.server.reconcile.held_requests import HeldRequests
from openenvd.system.process.proc import raise_fd_limit

from ..conftest import WAIT_SECONDS

CROWD = 3000
HEAD = b"GET /ws HTTP/1.1\r\nhost: 127.0.0.1\r\nopenenvd-environment: sample\r\n\r\n"


class Replicas:
    """Which environments have one: told by the test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left = asyncio.Event()
        self.served: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def until_served(self, name: str) -> str | None:
        self.asked.append(name)
        try:
            return await asyncio.shield(self.served)
        except asyncio.CancelledError:
            self.left.set()
            raise


@pytest.fixture
async def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
async def held(tmp_path: Path, replicas: Replicas) -> AsyncIterator[HeldRequests]:
    made = HeldRequests(tmp_path / "held.sock", replicas.until_served)
    await made.start()
    yield made
    await made.stop()


async def send(
    held: HeldRequests, data: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(held.path)
    writer.write(data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("why", [None, "sample has no replica: it exited with 3."])
async def test_a_request_is_held_until_it_is_known_whether_there_is_a_replica(
    held: HeldRequests, replicas: Replicas, why: str | None
) -> None:
    reader, writer = await send(held, HEAD)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    replicas.served.set_result(why)
    answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert (b"OpenEnvd-Retry: 1" in answer) is (why is None)
    assert why is None or why.encode() in answer
    assert replicas.asked == ["sample"]


async def test_a_crowd_is_held_and_shares_one_wait(held: HeldRequests, replicas: Replicas) -> None:
    if raise_fd_limit() < 3 * CROWD:
        pytest.skip(f"needs {3 * CROWD} descriptors")
    clients = [await send(held, HEAD) for _ in range(CROWD)]
    while held.count < CROWD:
        await asyncio.sleep(0)
    replicas.served.set_result(None)
    for reader, writer in clients:
        assert b"OpenEnvd-Retry: 1" in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        writer.close()
    assert len(replicas.asked) == 1


async def test_a_request_for_which_there_is_no_room_is_told_so(
    tmp_path: Path, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_requests, "connections_within", lambda *_, **__: 2)
    held = HeldRequests(tmp_path / "held.sock", replicas.until_served)
    await held.start()
    waiting = [await send(held, HEAD) for _ in range(2)]
    while not replicas.asked:
        await asyncio.sleep(0)
    for _ in range(2):
        reader, writer = await send(held, HEAD)
        answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"no more than 2 requests can wait for one" in answer
        writer.close()
    replicas.served.set_result(None)
    for reader, writer in waiting:
        assert b"OpenEnvd-Retry: 1" in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
        writer.close()
    await held.stop()


async def test_a_wait_that_fails_is_answered(held: HeldRequests, replicas: Replicas) -> None:
    reader, writer = await send(held, HEAD)
    replicas.served.set_exception(OSError("the database cannot be read"))
    answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    assert b"its log says why" in answer
    writer.close()


async def test_nothing_waits_for_a_client_that_has_left(
    held: HeldRequests, replicas: Replicas
) -> None:
    _, writer = await send(held, HEAD)
    writer.close()
    await asyncio.wait_for(replicas.left.wait(), WAIT_SECONDS)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200_000])
async def test_what_names_no_environment_is_not_held(
    held: HeldRequests, replicas: Replicas, data: bytes
) -> None:
    reader, writer = await send(held, data)
    assert b"OpenEnvd-Retry" not in await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    writer.close()
    assert replicas.asked == []


async def test_the_socket_is_its_owners_alone_and_goes_with_all_that_is_held(
    held: HeldRequests, replicas: Replicas
) -> None:
    assert stat.S_IMODE(held.path.stat().st_mode) == 0o600
    reader, writer = await send(held, HEAD)
    while not replicas.asked:
        await asyncio.sleep(0)
    await held.stop()
    await held.stop()  # a second one changes nothing
    assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
    writer.close()
    assert not held.path.exists()
