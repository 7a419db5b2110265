# SPDX-License-Identifier: Apache-2.0
"""The state process by itself: how many singers it can carry, asked with the frames they send.

Real PCM of 600 ms through the socket, from as many links as there would be shards. Beside it the
way the original measures itself (`unit-stress.py inner`): a call in its own process, with the
compressed packet where the samples should be.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from load_tests.peers.brigade_singers import PACKET_SAMPLES, PACKET_SECONDS
from load_tests.shared.report import percentile
from openenvd.env_host.shared_state.connection import StateLink, connect_state
from openenvd.env_host.shared_state.process import start_state_process
from openenvd.env_host.shared_state.proxy import StateProxy
from openenvd.envs.brigade.environment import BrigadeEnvironment
from openenvd.envs.brigade.mixing import Brigade
from openenvd.envs.brigade.opus import SAMPLE_RATE

LINKS = 4
SESSIONS_AT_ONCE = 64  # of calls, when it is asked for all it can do
_BARE = struct.Struct("<IQ32s")  # length, id, and as much again as our header has
COMPRESSED_SAMPLES = 1920  # of a packet of 3,840 bytes, read as samples


@dataclass(frozen=True)
class Asked:
    """What the state process did at a population."""

    p99_seconds: float
    misses: int
    cpu_share: float  # of one core


class Nothing:
    """A state that does nothing, for the way there and back alone."""

    def nothing(self) -> None:
        """Nothing."""


class NothingWorld:
    """Its class."""

    SHARED_STATE = True
    create_state = staticmethod(Nothing)


def unit_singers(samples: int, seconds: float) -> float:
    """Singers by a call in this process, with packets of so many samples."""
    brigade = Brigade()
    brigade.lead(1)
    brigade.start_song(1, at=-60 * SAMPLE_RATE)
    body = bytes(2 * samples)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        at = -(calls % 50 + 1) * SAMPLE_RATE
        brigade.mix(1, read_at=at, samples=samples, write_at=at, body=body)
        calls += 1
    return PACKET_SECONDS * calls / seconds


def socket_singers(seconds: float) -> float:
    """Singers by all that it can do, with whole packets through the socket."""
    process = start_state_process(BrigadeEnvironment)
    try:
        return uvloop.run(_all_it_can(process.address, seconds)) * PACKET_SECONDS
    finally:
        process.stop()


def at_population(singers: int, seconds: float) -> Asked:
    """Its answers to so many singers in real time."""
    process = start_state_process(BrigadeEnvironment)
    assert process.pid is not None
    try:
        return uvloop.run(_in_real_time(process.address, process.pid, singers, seconds))
    finally:
        process.stop()


def round_trips_a_second(calls: int) -> tuple[float, float]:
    """Calls that do nothing: one after the other, and pipelined."""
    process = start_state_process(NothingWorld)
    try:
        return uvloop.run(_round_trips(process.address, calls))
    finally:
        process.stop()


def bare_round_trips_a_second(calls: int) -> float:
    """The limit: frames of our header's size between bare processes on uvloop, pipelined."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/bare"
        process = subprocess.Popen(
            [sys.executable, "-m", "load_tests.peers.brigade_state", address, "-"]
        )
        try:
            while not os.path.exists(address):
                time.sleep(0.01)
            return uvloop.run(_bare_round_trips(address, calls))
        finally:
            process.kill()
            process.wait()


def idle_cpu_share(seconds: float) -> float:
    """Of one core, used by a state process to which four shards are connected and silent."""
    process = start_state_process(BrigadeEnvironment)
    assert process.pid is not None
    try:
        return uvloop.run(_idle(process.address, process.pid, seconds))
    finally:
        process.stop()


async def _links(address: str, count: int) -> list[StateLink]:
    return [await connect_state(address, f"shard {n}", lambda lost: None) for n in range(count)]


async def _begin(link: StateLink) -> None:
    world = StateProxy(link)
    await world.lead()
    await world.start_song(at=-60 * SAMPLE_RATE)


async def _all_it_can(address: str, seconds: float) -> float:
    links = await _links(address, LINKS)
    await _begin(links[0])
    pcm, until, calls = os.urandom(2 * PACKET_SAMPLES), time.monotonic() + seconds, 0

    async def sing(world: StateProxy) -> None:
        nonlocal calls
        while time.monotonic() < until:
            at = -(calls % 50 + 1) * SAMPLE_RATE
            await world.mix(pcm, read_at=at, samples=PACKET_SAMPLES, write_at=at)
            calls += 1

    await asyncio.gather(*(sing(StateProxy(links[n % LINKS])) for n in range(SESSIONS_AT_ONCE)))
    for link in links:
        await link.close()
    return calls / seconds


async def _in_real_time(address: str, pid: int, singers: int, seconds: float) -> Asked:
    links = await _links(address, LINKS)
    await _begin(links[0])
    pcm, latencies = os.urandom(2 * PACKET_SAMPLES), list[float]()
    packets = max(1, round(seconds / PACKET_SECONDS))

    async def sing(world: StateProxy, first_due: float) -> None:
        for number in range(packets):
            due = first_due + number * PACKET_SECONDS
            await asyncio.sleep(due - time.monotonic())
            at = -(number % 50 + 1) * SAMPLE_RATE
            await world.mix(pcm, read_at=at, samples=PACKET_SAMPLES, write_at=at)
            latencies.append(time.monotonic() - due)

    used, began = _cpu(pid), time.monotonic()
    first = began + 0.1
    await asyncio.gather(
        *(
            sing(StateProxy(links[n % LINKS]), first + PACKET_SECONDS * n / singers)
            for n in range(singers)
        )
    )
    share = (_cpu(pid) - used) / (time.monotonic() - began)
    for link in links:
        await link.close()
    misses = sum(latency > PACKET_SECONDS for latency in latencies)
    return Asked(percentile(latencies, 0.99), misses, share)


async def _round_trips(address: str, calls: int) -> tuple[float, float]:
    [link] = await _links(address, 1)
    world = StateProxy(link)

    async def many(count: int) -> None:
        for _ in range(count):
            await world.nothing()

    await many(100)
    began = time.perf_counter()
    await many(calls // 10)
    one_by_one = (calls // 10) / (time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*(many(calls // 100) for _ in range(100)))
    pipelined = (calls // 100) * 100 / (time.perf_counter() - began)
    await link.close()
    return one_by_one, pipelined


class BareServer(asyncio.Protocol):
    """Looks at each frame's length and id, and sends all of a turn back."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        frames = [_BARE.pack(*frame) for frame in _BARE.iter_unpack(data)]
        self._transport.write(b"".join(frames))


class BareClient(asyncio.Protocol):
    """A future for each frame, by its id."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self._out: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _, number, _ in _BARE.iter_unpack(data):
            self._waiting.pop(number).set_result(None)

    def call(self) -> asyncio.Future[None]:
        """There and back."""
        self._last += 1
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(_BARE.pack(_BARE.size, self._last, bytes(32)))
        self._waiting[self._last] = future = asyncio.get_running_loop().create_future()
        return future

    def _flush(self) -> None:
        frames, self._out = self._out, []
        self._transport.write(b"".join(frames))


async def _bare_round_trips(address: str, calls: int) -> float:
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_unix_connection(BareClient, address)

    async def many(count: int) -> None:
        for _ in range(count):
            await client.call()

    began = time.perf_counter()
    await asyncio.gather(*(many(calls // 100) for _ in range(100)))
    seconds = time.perf_counter() - began
    transport.close()
    return calls // 100 * 100 / seconds


async def _be_bare(address: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(BareServer, address)
    await server.serve_forever()


async def _idle(address: str, pid: int, seconds: float) -> float:
    links = await _links(address, LINKS)
    used = _cpu(pid)
    await asyncio.sleep(seconds)
    share = (_cpu(pid) - used) / seconds
    for link in links:
        await link.close()
    return share


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class SlowEcho:
    """Says back what it is told, once it is released."""

    def __init__(self) -> None:
        self._held = 0
        self._gate = asyncio.Event()

    async def hold(self, of: str) -> str:
        """`of`, after `release`."""
        self._held += 1
        await self._gate.wait()
        return of

    async def held(self, at_least: int) -> None:
        """Wait until so many calls are held."""
        while self._held < at_least:
            await asyncio.sleep(0.001)

    def release(self) -> None:
        """Answer them all."""
        self._gate.set()


class SlowEchoWorld:
    """Its class."""

    SHARED_STATE = True
    create_state = staticmethod(SlowEcho)


def victim_command(address: str) -> list[str]:
    """A shard whose call will not be answered before it is killed."""
    return [sys.executable, "-m", "load_tests.peers.brigade_state", address]


async def _be_victim(address: str) -> None:
    await StateProxy(await connect_state(address, "shard 0")).hold(of="victim")


if __name__ == "__main__":
    uvloop.run(_be_bare(sys.argv[1]) if sys.argv[2:] else _be_victim(sys.argv[1]))
