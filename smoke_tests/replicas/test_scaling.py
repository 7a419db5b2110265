# SPDX-License-Identifier: Apache-2.0
"""Replicas come and go under sessions of upstream's client, and none of them notices."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..conftest import Machine, eventually

# Some sessions are kept and stepped all the time, others begin and end all the time.
CLIENTS = """
import asyncio, json, sys
from openenv import GenericEnvClient

errors, counts = [], {"steps": 0, "sessions": 0}

async def steps(address, is_over):
    async with GenericEnvClient(base_url=address) as env:
        await env.reset()
        counts["sessions"] += 1
        number = 0
        while not is_over(number):
            number += 1
            result = await env.step({"message": "hello"})
            assert result.observation["echoed_message"] == "hello", result
            counts["steps"] += 1
            await asyncio.sleep(0.01)
        state = await env.state()
        assert state["step_count"] == number, state

async def noted(work):
    try:
        await work
    except Exception as exc:
        errors.append(repr(exc))

async def main(address, kept, short):
    over = asyncio.Event()
    async def churn():
        while not over.is_set():
            await noted(steps(address, lambda number: number >= 5))
    work = [noted(steps(address, lambda _: over.is_set())) for _ in range(kept)]
    tasks = [asyncio.create_task(each) for each in [*work, *(churn() for _ in range(short))]]
    while counts["sessions"] < kept + short:
        await asyncio.sleep(0.01)
    print("going", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    over.set()
    await asyncio.gather(*tasks)
    print(json.dumps({"errors": errors, **counts}))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@contextmanager
def clients(python: Path, address: str, *, kept: int, short: int) -> Iterator[dict[str, Any]]:
    """Run sessions meanwhile; their figures are there afterwards."""
    figures: dict[str, Any] = {}
    with subprocess.Popen(
        [str(python), "-c", CLIENTS, address, str(kept), str(short)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "going\n"
            yield figures
            figures |= json.loads(process.communicate(timeout=120)[0])
        finally:
            process.kill()


def replicas(machine: Machine) -> list[str]:
    return [replica["state"] for replica in machine.environment("echo")["replicas"]]


def test_no_session_ends_while_replicas_are_added_and_drained(
    machine: Machine, upstream: Path
) -> None:
    address = machine.ok("launch", "echo", "--json").json["environment"]["address"]
    with clients(upstream, address, kept=6, short=4) as figures:
        scaled = machine.ok("scale", "echo", "3").out
        assert scaled == "✓ echo has 3 replicas\n"
        assert replicas(machine) == ["READY"] * 3
        assert machine.environment("echo")["address"] == address
        with clients(upstream, address, kept=6, short=0) as more:
            machine.ok("scale", "echo", "1")
            assert machine.environment("echo")["state"] == "READY"
        assert (more["errors"], more["sessions"]) == ([], 6)
        machine.ok("scale", "echo", "2")
    assert figures["errors"] == []
    assert figures["sessions"] > 10
    eventually(lambda: replicas(machine) == ["READY"] * 2)


def test_a_restart_ends_no_session(machine: Machine, upstream: Path) -> None:
    options = ["launch", "echo", "--replicas", "2", "--json"]
    address = machine.ok(*options).json["environment"]["address"]
    before = {replica["pid"] for replica in machine.environment("echo")["replicas"]}
    with clients(upstream, address, kept=0, short=8) as figures:
        machine.ok("restart", "echo")
    assert figures["errors"] == []
    assert figures["sessions"] > 8
    eventually(lambda: replicas(machine) == ["READY"] * 2)
    assert not before & {replica["pid"] for replica in machine.environment("echo")["replicas"]}
