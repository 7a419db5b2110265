# SPDX-License-Identifier: Apache-2.0
"""An idle environment sleeps, and upstream's clients do not notice."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Machine, eventually

IDLE_SECONDS = "0.3"

# Clients connect one after another, or a few at once, at random moments around the idle time-out.
# They share one process, because importing upstream's package takes seconds.
ROUNDS = 20
CLIENTS = """
import asyncio, json, random, sys
from openenv import GenericEnvClient

chance = random.Random(14)

async def session(address, errors):
    try:
        async with GenericEnvClient(base_url=address) as env:
            await env.reset()
            result = await env.step({"message": "hello"})
            assert result.observation["echoed_message"] == "hello", result
    except Exception as exc:
        errors.append(repr(exc))

async def come(address, rounds, idle):
    sessions, errors = 0, []
    for _ in range(rounds):
        await asyncio.sleep(chance.uniform(0.5 * idle, 2 * idle))
        clients = [session(address, errors) for _ in range(chance.choice((1, 1, 4)))]
        await asyncio.gather(*clients)
        sessions += len(clients)
    return {"errors": errors, "sessions": sessions}

for line in sys.stdin:
    print(json.dumps(asyncio.run(come(*json.loads(line)))), flush=True)
"""
Clients = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def clients(upstream: Path) -> Iterator[Clients]:
    """A function that runs clients for a number of rounds, and returns their figures."""
    pipe = subprocess.PIPE
    command = [str(upstream), "-c", CLIENTS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        told, answers = process.stdin, process.stdout

        def come(address: str, rounds: int = ROUNDS) -> dict[str, Any]:
            print(json.dumps([address, rounds, float(IDLE_SECONDS)]), file=told, flush=True)
            assert answers is not None
            figures: dict[str, Any] = json.loads(answers.readline())
            return figures

        yield come
        told.close()


def launch(machine: Machine, *words: str) -> str:
    """Launch an environment that soon sleeps; returns its address."""
    options = ["--shards", "1", "--idle-timeout", IDLE_SECONDS, *words, "--json"]
    address: str = machine.ok("launch", "echo", *options).json["environment"]["address"]
    return address


def sleeps(machine: Machine) -> bool:
    return bool(machine.environment("echo")["state"] == "ASLEEP")


@pytest.mark.timeout(600)
def test_no_client_notices_that_an_environment_sleeps(machine: Machine, clients: Clients) -> None:
    figures = clients(launch(machine))
    assert figures["errors"] == []
    assert figures["sessions"] >= ROUNDS
    assert machine.replica()["wakes"] > ROUNDS / 10
    assert machine.replica()["restarts"] == 0
    eventually(lambda: sleeps(machine))
    shown = machine.ok("status", "echo").out
    assert "ASLEEP" in shown
    assert "sleeping; wakes on connect" in shown


def test_an_environment_that_sleeps_is_changed_as_any_other(
    machine: Machine, clients: Clients
) -> None:
    address = launch(machine)
    for words in (["restart", "echo"], ["scale", "echo", "2"], ["scale", "echo", "1"]):
        eventually(lambda: sleeps(machine))
        machine.ok(*words)
        assert clients(address, 2)["errors"] == []
        if words[-1] == "2":
            assert machine.environment("echo")["state"] == "READY"
            machine.ok("scale", "echo", "1")
    eventually(lambda: sleeps(machine))
    assert launch(machine, "--max-sessions", "7") == address
    assert clients(address, 2)["errors"] == []
    eventually(lambda: sleeps(machine))
    machine.ok("logs", "echo")
    machine.ok("down", "echo")


def test_a_daemon_that_is_killed_meanwhile_finds_it_asleep(
    machine: Machine, clients: Clients
) -> None:
    address = launch(machine)
    eventually(lambda: sleeps(machine))
    machine.kill_daemon()
    assert clients(address, 2)["errors"] == []
    machine.ok("status")
    eventually(lambda: sleeps(machine))
    assert clients(address, 2)["errors"] == []
    assert machine.replica()["restarts"] == 0


@pytest.mark.parametrize("sessions", ["4", "8"])
def test_the_last_replica_of_a_range_sleeps(
    machine: Machine, clients: Clients, sessions: str
) -> None:
    words = ("--replicas", "2", "--min", "0", "--max", "2", "--max-sessions", sessions)
    address = launch(machine, *words, "--set", "scale-down=0.5")
    eventually(lambda: sleeps(machine), within=60)
    assert clients(address, 2)["errors"] == []
    eventually(lambda: sleeps(machine), within=60)
