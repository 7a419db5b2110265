# SPDX-License-Identifier: Apache-2.0
"""The time until an environment is ready, a dead shard is replaced, and a sleeping one answers.

    python -m load_tests.launch                     `benchmark`, and the bundled `echo` asleep
    python -m load_tests.launch --project           an upstream project, too (installs it once)
    python -m load_tests.launch --parts asleep --repetitions 40

The project is the benchmark with its own virtual environment, upstream's base classes and
`create_app`. Aims: first ready under 2 s for the project, each further shard under 100 ms, 4 idle
shards under 150 MB PSS together. A shard is killed with SIGKILL; it is replaced when a new pid
serves a session.

Asleep: the bundled `echo`. Each repetition waits until it is asleep, measures the PSS of its
processes, and times one client from its connect to the answer to its first reset; then a second
client, which finds it awake. Aims: asleep, only the shim runs; no client waits for half a second.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from load_tests.peers.scaling_servers import openenv, seconds_to_ready, write_project
from load_tests.shared.api_client import ApiClient
from load_tests.shared.light_clients import open_session
from load_tests.shared.report import (
    MEGABYTE,
    Report,
    daemon,
    parse_arguments,
    percentile,
    pss_bytes,
)
from openenvd.rollouts.bench.generator import Batch
from openenvd.rollouts.bench.results import Target
from openenvd.rollouts.bench.sweep import HEAD_START_SECONDS, Crew
from openenvd.system.text.units import MB

SHARDS = 4
SESSIONS = 16  # enough to reach every shard
BACK_SECONDS = 30.0
BATCH_SECONDS = 5.0
IDLE_SECONDS = "0.5"
POLL_INTERVAL_SECONDS = 0.02


def main() -> None:
    options = parse_arguments(
        "Launching.",
        5,
        parts={"nargs": "+", "choices": ["awake", "asleep"], "default": ["awake", "asleep"]},
        project={"action": "store_true", "help": "an upstream project too"},
    )
    report = Report("Launching")
    with daemon() as environ:
        if "awake" in options.parts:
            _awake(report, environ, options)
        if "asleep" in options.parts:
            asyncio.run(_asleep(report, environ, options.repetitions))
    report.finish(options.json)


def _awake(report: Report, environ: dict[str, str], options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, Crew(1) as crew:
        sources = ["benchmark"]
        if options.project:
            sources.append(str(write_project(Path(folder) / "waits")))
        for source in sources:
            with _launched(environ, source, 1):
                pass  # its virtual environment is made now
            for _ in range(options.repetitions):
                _shards(report, environ, crew, source)
    seconds = HEAD_START_SECONDS * 1000
    report.note(f"kill -9 to a session: with {seconds:.0f} ms of the generator's own")


def _shards(report: Report, environ: dict[str, str], crew: Crew, source: str) -> None:
    name = Path(source).name
    with _launched(environ, source, 1) as (one, _target):
        report.append(f"{name}: request to ready, 1 shard (aim: 2)", "s", one)
    with _launched(environ, source, SHARDS) as (several, target):
        report.append(f"{name}: request to ready, {SHARDS} shards", "s", several)
        further = (several - one) / (SHARDS - 1)
        report.append(f"{name}: each further shard (aim: 0.1)", "s", further)
        idle = sum(pss_bytes(target.root_pids)) / MB
        report.append(f"{name}: host and {SHARDS} idle shards, PSS (aim: 150)", "MB", idle)
        back = _seconds_until_back(crew, target)
        report.append(f"{name}: kill -9 of a shard to its successor's session", "s", back)


@contextmanager
def _launched(environ: dict[str, str], source: str, shards: int) -> Iterator[tuple[float, Target]]:
    answer = openenv(environ, "launch", source, "--shards", str(shards), "--max-sessions", "400")
    name = answer["environment"]["name"]
    try:
        shown = openenv(environ, "status", name)["environments"][0]
        pids = tuple(replica["pid"] for replica in shown["replicas"])
        target = Target(name, answer["environment"]["address"], pids)
        yield seconds_to_ready(environ, answer), target
    finally:
        openenv(environ, "down", name)


def _seconds_until_back(crew: Crew, target: Target) -> float:
    """Kill one of the serving shards; returns the seconds until a new one serves."""
    before = _serving(crew, target)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    while time.monotonic() - killed_at < BACK_SECONDS:
        if _serving(crew, target) - before:
            return time.monotonic() - killed_at
    raise SystemExit(f"{target.name}: no successor of shard {victim} within {BACK_SECONDS} s")


def _serving(crew: Crew, target: Target) -> set[int]:
    action: dict[str, Any] = {"wait_seconds": 0.0}
    batch = Batch(target.host, target.port, "", SESSIONS, action, BATCH_SECONDS, SESSIONS)
    outcomes = [outcome for report in crew.run(batch) for outcome in report["outcomes"]]
    return {outcome["observation"]["pid"] for outcome in outcomes if outcome["observation"]}


async def _asleep(report: Report, environ: dict[str, str], repetitions: int) -> None:
    api, home = ApiClient(environ["OPENENV_HOME"]), Path(environ["OPENENV_HOME"])
    openenv(environ, "launch", "echo", "--idle-timeout", IDLE_SECONDS, "--shards", "1")
    address = urlsplit(openenv(environ, "address", "echo")["address"])

    async def first_answer() -> float:
        began = time.perf_counter()
        session = await open_session(address.hostname or "", address.port or 80, "")
        milliseconds = (time.perf_counter() - began) * 1000
        session.end()
        return milliseconds

    def megabytes() -> float:
        shim = json.loads(next(home.glob("run/echo-*/replica.json")).read_text())["shim"]
        return sum(pss_bytes([shim["pid"]])) / MEGABYTE

    latencies: dict[str, list[float]] = {"asleep": [], "awake": []}
    for _ in range(repetitions):
        while (found := await api.environment("echo"))["state"] != "ASLEEP" or (
            found["replicas"][0]["pid"] is not None
        ):
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        report.append("echo: PSS asleep", "MB", megabytes())
        for how in latencies:
            latencies[how].append(await first_answer())
        report.append("echo: PSS after a session", "MB", megabytes())
    await api.close()
    for how, milliseconds in latencies.items():
        report.add(f"echo: connect to first answer, {how}", "ms", milliseconds)
        report.add("  P99", "ms", [percentile(milliseconds, 0.99)])


if __name__ == "__main__":
    main()
