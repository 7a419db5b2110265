# SPDX-License-Identifier: Apache-2.0
"""How soon an environment is ready, what each further shard adds, and how soon a dead one is back.

    python -m load_tests.shard_start --repetitions 5
    python -m load_tests.shard_start --project          an upstream project too (installs it once)

The bundled `benchmark`, and with `--project` the same environment as an upstream project: its own
virtual environment, upstream's base classes and `create_app`. Aims: first ready under 2 s for the
project, each further shard under 100 ms, 4 idle shards under 150 MB PSS together. A shard is killed
with SIGKILL; it is back when a session is served by a pid that was not there before.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from load_tests.peers.scaling_servers import openenv, write_project
from load_tests.shared.report import Report, daemon, parse_arguments
from openenvd.bench.crew import HEAD_START_SECONDS, Crew
from openenvd.bench.generator import Batch
from openenvd.bench.target import Target, pss_bytes
from openenvd.system.units import MB

SHARDS = 4
SESSIONS = 16  # enough to meet every shard
BACK_SECONDS = 30.0
BATCH_SECONDS = 5.0


def main() -> None:
    """Measure, in turn."""
    options = parse_arguments(
        "Starting shards.", 5, project={"action": "store_true", "help": "an upstream project too"}
    )
    report = Report("Starting shards")
    with daemon() as environ, tempfile.TemporaryDirectory() as folder, Crew(1) as crew:
        with _launched(environ, "benchmark", 1):
            pass  # the first launch of a daemon starts more than a replica
        _measure(report, environ, crew, "benchmark", options.repetitions)
        if options.project:
            project = write_project(Path(folder) / "waits")
            with _launched(environ, str(project), 1):
                pass  # its virtual environment is made now
            _measure(report, environ, crew, str(project), options.repetitions)
    report.note(f"the last line includes {HEAD_START_SECONDS * 1000:.0f} ms of the generator's own")
    report.finish(options.json)


def _measure(
    report: Report, environ: dict[str, str], crew: Crew, source: str, repetitions: int
) -> None:
    name = Path(source).name
    one: list[float] = []
    several: list[float] = []
    idle: list[float] = []
    back: list[float] = []
    for _ in range(repetitions):
        with _launched(environ, source, 1) as (seconds, _target):
            one.append(seconds)
        with _launched(environ, source, SHARDS) as (seconds, target):
            several.append(seconds)
            idle.append(sum(pss_bytes(target).values()) / MB)
            back.append(_seconds_until_back(crew, target))
    report.add(f"{name}: request to ready, 1 shard (aim: 2)", "s", one)
    report.add(f"{name}: request to ready, {SHARDS} shards", "s", several)
    further = [(b - a) / (SHARDS - 1) for a, b in zip(one, several, strict=True)]
    report.add(f"{name}: each further shard (aim: 0.1)", "s", further)
    report.add(f"{name}: host and {SHARDS} idle shards, PSS (aim: 150)", "MB", idle)
    report.add(f"{name}: kill -9 of a shard to its successor's session", "s", back)


@contextmanager
def _launched(environ: dict[str, str], source: str, shards: int) -> Iterator[tuple[float, Target]]:
    """From request to ready, and who is there then."""
    answer = openenv(environ, "launch", source, "--shards", str(shards), "--max-sessions", "400")
    name = answer["environment"]["name"]
    try:
        told = openenv(environ, "wait", answer["request_id"])
        request = told.get("request", told)
        shown = openenv(environ, "status", name)["environments"][0]
        pids = tuple(replica["pid"] for replica in shown["replicas"])
        target = Target(name, answer["environment"]["address"], pids)
        yield request["finished_at"] - request["created_at"], target
    finally:
        openenv(environ, "down", name)


def _seconds_until_back(crew: Crew, target: Target) -> float:
    """Kill one of those that serve; when one serves that did not before."""
    before = _serving(crew, target)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    while time.monotonic() - killed_at < BACK_SECONDS:
        if _serving(crew, target) - before:
            return time.monotonic() - killed_at
    raise SystemExit(f"{target.name}: no successor of shard {victim} within {BACK_SECONDS} s")


def _serving(crew: Crew, target: Target) -> set[int]:
    """The pids that answered a handful of sessions."""
    action: dict[str, Any] = {"wait_seconds": 0.0}
    batch = Batch("ws", target.host, target.port, "", SESSIONS, action, BATCH_SECONDS, SESSIONS)
    outcomes = crew.run(batch).outcomes
    return {outcome["observation"]["pid"] for outcome in outcomes if outcome["observation"]}


if __name__ == "__main__":
    main()
