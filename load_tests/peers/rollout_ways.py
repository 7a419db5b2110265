# SPDX-License-Identifier: Apache-2.0
"""Ways to collect the same episodes; `rollouts.py` runs each in a process of its own.

    python -m load_tests.peers.rollout_ways ours|naive|idle ADDRESS FOLDER '{"episodes": 256, …}'

The first two produce the same: every step in a file, an advantage for each episode, and each
episode's payloads joined into one piece, as a trainer gets routed experts. Each way prints a line
of JSON.

    ours    collector ─▶ advantages per group ─▶ writer, a step at a time, in a bounded buffer; each
            finished episode is read back and joined once, in one thread
    naive   all in memory until the last episode has ended; then 512 threads, which join anew at
            every step, and one `orjson.dumps` of all, in threads like the original
    idle    a loop that does nothing until stdin ends: its lag is the machine's

The naive way is prime-rl's orchestrator before its pull request 2609, with advantages: uvloop,
orjson, a better client library, no base64. It ends before it would exceed `most_bytes`.
"""

import asyncio
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import uvloop
from websockets.asyncio.client import connect

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.readers import EpisodeRow, Rollouts, open_rollouts
from openenvd.rollouts.folder.writer import RolloutWriter
from openenvd.rollouts.stages.sinks import GroupSink
from openenvd.system.process.loop_lag import EventLoopLagMonitor

GROUP = 8
NAIVE_THREADS = 512
LAG_WINDOW_SECONDS = 3600.0
TOLD_SECONDS = 60.0  # the figures show stalls; logging stacks would add to them
WATCH_SECONDS = 0.05


@dataclass(frozen=True)
class Task:
    """The episodes to collect, and the limits."""

    episodes: int
    steps: int
    concurrency: int
    payload_bytes: int  # of each step
    running_bytes: int  # ours: limit of running episodes …
    buffer_bytes: int  # … and of steps that wait to be written
    disk_bytes_per_second: int | None = None
    most_bytes: int = 1 << 62  # naive: ends before it exceeds this


@dataclass
class Told:
    """The measurements of one way."""

    seconds: float = 0.0
    steps: int = 0
    episodes: int = 0
    joined_bytes: int = 0
    lag_p50_seconds: float = 0.0
    lag_p99_seconds: float = 0.0
    lag_max_seconds: float = 0.0
    starved_seconds: float = 0.0  # the loop's thread waited for a core
    base_bytes: int = 0  # of memory, before the start
    peak_bytes: int = 0
    out_of_memory: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


class SlowDisk(Disk):
    """A disk with a limited number of bytes a second."""

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        time.sleep(sum(memoryview(chunk).nbytes for chunk in chunks) / self._bytes_per_second)
        super().write(descriptor, chunks)


# Ours.


async def ours(address: str, folder: Path, task: Task, told: Told) -> None:
    speed = task.disk_bytes_per_second

    async def policy(_observation: Any) -> dict[str, Any]:
        return {"answer_bytes": task.payload_bytes}

    writer = await RolloutWriter.open(
        folder, buffer_bytes=task.buffer_bytes, disk=None if speed is None else SlowDisk(speed)
    )
    sink = GroupSink(writer, GROUP)
    collector = RolloutCollector(
        address,
        policy,
        concurrency=task.concurrency,
        max_steps=task.steps,
        buffer_bytes=task.running_bytes,
    )
    await collector.collect(range(task.episodes), sink)
    await sink.close()
    told.notes["failures"] = dict(collector.stats.failures)
    rollouts = open_rollouts(folder)
    told.joined_bytes = await asyncio.to_thread(_join_once, rollouts)
    told.episodes = len(set(rollouts.episode_ids()))
    told.steps = sum(episode.row["steps"] for episode in rollouts)


def _join_once(rollouts: Rollouts) -> int:
    """Copy each episode's payloads once, one after the other into the same memory."""
    joined, joined_bytes = bytearray(), 0
    for episode in rollouts:
        at = 0
        for observation in _observations(episode):
            piece = observation["payload"].encode()
            joined[at : at + len(piece)] = piece  # grows with the longest of the episodes
            at += len(piece)
        joined_bytes += at
    return joined_bytes


def _observations(episode: EpisodeRow) -> Iterator[Any]:
    for step in episode.steps():
        yield step.observation
    yield episode.final_observation


# The naive way.


async def naive(address: str, folder: Path, task: Task, told: Told) -> None:
    _end_beyond(task.most_bytes, told)
    folder.mkdir()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NAIVE_THREADS))
    limit = asyncio.Semaphore(task.concurrency)
    rollouts = await asyncio.gather(*(_episode(address, task, limit) for _ in range(task.episodes)))
    joined = await asyncio.gather(*(asyncio.to_thread(_join_at_each_step, r) for r in rollouts))
    told.joined_bytes = sum(map(len, joined))
    _weigh(rollouts)
    await asyncio.to_thread(_save, folder / "rollouts.json", rollouts)
    told.episodes, told.steps = len(rollouts), sum(len(r["steps"]) for r in rollouts)


async def _episode(address: str, task: Task, limit: asyncio.Semaphore) -> dict[str, Any]:
    action = {"type": "step", "data": {"answer_bytes": task.payload_bytes}}
    steps, url = [], address.replace("http", "ws", 1) + "/ws"
    async with limit, connect(url, max_size=None, compression=None) as socket:
        await socket.send(json.dumps({"type": "reset", "data": {}}))
        await socket.recv()
        for _ in range(task.steps):
            await socket.send(orjson.dumps(action), text=True)
            answer = orjson.loads(await socket.recv(decode=False))["data"]
            steps.append({"action": action["data"], **answer})
    return {"steps": steps, "reward": sum(step["reward"] or 0.0 for step in steps)}


def _join_at_each_step(rollout: dict[str, Any]) -> bytes:
    packed = b""
    for step in rollout["steps"]:
        new = np.frombuffer(step["observation"]["payload"].encode(), dtype=np.uint8)
        packed = np.concatenate([np.frombuffer(packed, dtype=np.uint8), new]).tobytes()
    return packed


def _weigh(rollouts: Sequence[dict[str, Any]]) -> None:
    for at in range(0, len(rollouts), GROUP):
        group = rollouts[at : at + GROUP]
        mean = statistics.fmean(rollout["reward"] for rollout in group)
        for rollout in group:
            rollout["advantage"] = rollout["reward"] - mean


def _save(path: Path, rollouts: Sequence[dict[str, Any]]) -> None:
    path.write_bytes(orjson.dumps(rollouts))


async def idle(_address: str, _folder: Path, _task: Task, _told: Told) -> None:
    await asyncio.to_thread(sys.stdin.read)


def _end_beyond(most_bytes: int, told: Told) -> None:
    def watch() -> None:
        while (now_bytes := psutil.Process().memory_info().rss) <= most_bytes:
            time.sleep(WATCH_SECONDS)
        told.out_of_memory, told.peak_bytes = True, now_bytes
        print(json.dumps(asdict(told)), flush=True)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


async def _measured(work: Coroutine[Any, Any, None], told: Told) -> None:
    lag = EventLoopLagMonitor(
        "load test", window_seconds=LAG_WINDOW_SECONDS, stall_seconds=TOLD_SECONDS
    )
    began, starved = time.monotonic(), _starved_seconds()
    with lag:
        await work
        seen = lag.snapshot()
    told.seconds = time.monotonic() - began
    told.starved_seconds = _starved_seconds() - starved
    told.lag_p50_seconds, told.lag_p99_seconds = seen.p50_seconds, seen.p99_seconds
    told.lag_max_seconds = seen.max_seconds


def _starved_seconds() -> float:
    """Return how long this thread has waited for a core (Linux's schedstat)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def main() -> None:
    way, address, folder = sys.argv[1:4]
    task, told = (
        Task(**json.loads(sys.argv[4])),
        Told(base_bytes=psutil.Process().memory_info().rss),
    )
    run = {"ours": ours, "naive": naive, "idle": idle}[way]
    uvloop.run(_measured(run(address, Path(folder), task, told), told))
    told.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(asdict(told)))


if __name__ == "__main__":
    main()
