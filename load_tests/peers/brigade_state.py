# SPDX-License-Identifier: Apache-2.0
"""The state process by itself: how many singers it can carry, asked with the frames they send.

Real PCM of 600 ms through the socket, from as many links as there would be shards. Beside it the
way the original measures itself (`unit-stress.py inner`): a call in its own process, with the
compressed packet where the samples should be.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

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
COMPRESSED_SAMPLES = 1920  # of a packet of 3,840 bytes, read as samples


@dataclass(frozen=True)
class Asked:
    """What the state process did at a population."""

    p99_seconds: float
    misses: int
    cpu_share: float  # of one core


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


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
