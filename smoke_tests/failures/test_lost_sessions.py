# SPDX-License-Identifier: Apache-2.0
"""What upstream's own client raises when something below its session is killed in a step.

An asynchronous client and a synchronous one wait for a step each. Whatever is killed: each is told
by an exception, or has its answer where no session is lost; and the next `reset` of the same client
object is answered within seconds. Deaths for memory, and those of containers, of the agent and of
dockerd, are rows of `smoke_tests/providers`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from ..conftest import Machine, eventually
from ..upstream.upstream_python import UpstreamPython

LONG_SECONDS = 100.0  # of a step that is cut short
SHORT_SECONDS = 3.0  # of one that outlives what is killed
ENVIRONMENT = """
import time
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Wait(Action):
    seconds: float = 0.0

class Sample(Environment[Wait, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        return Observation()

    def step(self, action, **more):
        print("in a step", flush=True)
        time.sleep(action.seconds)
        return Observation(done=True)

    @property
    def state(self):
        return State()
"""

CLIENT = """
import asyncio, json, sys, time
from openenv import GenericEnvClient

def told(exc):
    return {"type": type(exc).__name__, "text": str(exc)}

async def use(address, action):
    found = {}
    env = GenericEnvClient(base_url=address)
    await env.reset()
    try:
        found["is_done"] = (await env.step(action)).done
    except Exception as exc:
        found |= told(exc)
    while "has_session" not in found:
        try:
            await env.reset()
            found["has_session"] = True
        except ConnectionError:
            await asyncio.sleep(0.05)
    await env.close()
    return found

def use_sync(address, action):
    found = {}
    with GenericEnvClient(base_url=address).sync() as env:
        env.reset()
        try:
            found["is_done"] = env.step(action).done
        except Exception as exc:
            found |= told(exc)
        while "has_session" not in found:
            try:
                env.reset()
                found["has_session"] = True
            except ConnectionError:
                time.sleep(0.05)
    return found

async def main(address, action):
    both = use(address, action), asyncio.to_thread(use_sync, address, action)
    print(json.dumps(await asyncio.gather(*both)))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


class Stage:
    """An environment, and two of upstream's clients that wait for a step."""

    def __init__(self, machine: Machine, upstream: UpstreamPython, sample: str) -> None:
        self.machine = machine
        self._upstream = upstream
        self._sample = sample

    def begin(self, *words: str, seconds: float = LONG_SECONDS) -> None:
        words = ("launch", self._sample, "--name", "sample", *words, "--json")
        address = self.machine.ok(*words, timeout=300).json["environment"]["address"]
        folder, environ = self.machine.home.parent, self.machine.environ
        words = (address, json.dumps({"seconds": seconds}))
        self._upstream.start(CLIENT, *words, folder=folder, environ=environ)
        eventually(self._have_both_begun)

    def _have_both_begun(self) -> bool:
        return self.machine.ok("logs", "sample").out.count("in a step") == 2

    @property
    def replica(self) -> dict[str, Any]:
        [found] = self.machine.environment("sample")["replicas"]
        return dict(found)

    def outcomes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._upstream.communicate())
        assert len(found) == 2
        return found

    def are_told(self, kind: str, *texts: str) -> None:
        """Assert that both steps raised this, and that there was a session again."""
        for outcome in self.outcomes():
            seen = f"{outcome}\n{self.machine.ok('logs', 'sample').out}"
            assert outcome.get("type") == kind, seen
            assert all(text in outcome["text"] for text in texts), outcome
            assert outcome["has_session"], outcome

    def lost_nothing(self) -> None:
        assert [outcome.get("is_done") for outcome in self.outcomes()] == [True, True]


@pytest.fixture
def stage(
    machine: Machine, upstream_python: UpstreamPython, write_environment: Callable[[str], str]
) -> Stage:
    return Stage(machine, upstream_python, write_environment(ENVIRONMENT))


GATEWAY = ["--gateway"]
GONE = (
    "Server error: The replica of this session is gone; the session has ended "
    "(`openenv status sample` shows why). (code: SESSION_ERROR)"
)
NO_CLOSE_FRAME = "no close frame received or sent"


def gateway_of(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = stage.machine.ok("gateway", "status", "--json").json["gateway"]
    return found


@pytest.mark.parametrize("words", [[], GATEWAY])
def test_a_killed_shard_is_told_with_the_signal(stage: Stage, words: list[str]) -> None:
    stage.begin(*words)
    for shard in psutil.Process(stage.replica["pid"]).children():
        shard.kill()
    stage.are_told("RuntimeError", "SIGKILL", "the session has ended", "SESSION_ERROR")


def test_a_killed_replica_is_the_end_of_the_connection(stage: Stage) -> None:
    stage.begin()
    os.kill(stage.replica["pid"], signal.SIGKILL)
    stage.are_told("ConnectionClosedError", NO_CLOSE_FRAME)


def test_a_killed_replica_is_told_by_the_gateway(stage: Stage) -> None:
    stage.begin(*GATEWAY)
    os.kill(stage.replica["pid"], signal.SIGKILL)
    stage.are_told("RuntimeError", GONE)


def test_a_killed_gateway_is_the_end_of_the_connection(stage: Stage) -> None:
    stage.begin(*GATEWAY)
    os.kill(gateway_of(stage)["pid"], signal.SIGKILL)
    stage.are_told("ConnectionClosedError", NO_CLOSE_FRAME)


def test_a_killed_daemon_costs_no_session(stage: Stage) -> None:
    stage.begin(*GATEWAY, seconds=SHORT_SECONDS)
    gateway = gateway_of(stage)
    stage.machine.kill_daemon()
    stage.lost_nothing()
    eventually(lambda: gateway_of(stage)["state"] == "READY")  # of the next daemon
    assert gateway_of(stage)["pid"] == gateway["pid"]
