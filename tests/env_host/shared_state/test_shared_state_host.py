# SPDX-License-Identifier: Apache-2.0
"""Shared worlds as clients see them: a whole host, its state process killed, its shards killed."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..conftest import StartHost
from ..hosts import Client, Host

WORLD = '''
import os
from typing import Any
from openenvd.env_host.environment.interfaces import Action, Environment, Observation, State

class Board:
    """Everybody writes on one board."""
    def __init__(self):
        self.lines, self.readers = [], set()
    def write(self, session, line):
        self.readers.add(session)
        self.lines.append(line)
        return {"lines": self.lines, "pid": os.getpid(), "readers": len(self.readers)}
    async def wait(self):
        import asyncio
        await asyncio.sleep(3600)
    def session_ended(self, session):
        self.readers.discard(session)

class Say(Action):
    line: str = ""

class Seen(Observation):
    lines: list = []
    state_pid: int = 0
    shard_pid: int = 0
    readers: int = 0

class SyncWriter(Environment[Say, Seen, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    SHARED_STATE = True
    create_state = Board
    def reset(self, **kwargs):
        return seen(self.world.wait_for(self.world.write(line="came")))
    def step(self, action, **kwargs):
        return seen(self.world.wait_for(self.world.write(line=action.line)))
    @property
    def state(self):
        return State()

class Writer(SyncWriter):
    async def reset_async(self, **kwargs):
        return await self.step_async(Say(line="came"))
    async def step_async(self, action, **kwargs):
        if action.line == "wait":
            await self.world.within(3600).wait()
        return seen(await self.world.write(line=action.line))

class Broken(SyncWriter):
    @staticmethod
    def create_state():
        raise LookupError("no board")

class AloneWriter(SyncWriter):
    SUPPORTS_CONCURRENT_SESSIONS = False

def seen(facts):
    return Seen(lines=facts["lines"], state_pid=facts["pid"], shard_pid=os.getpid(),
                readers=facts["readers"])
'''

THREADED = (
    WORLD
    + """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
)


@pytest.fixture
def worlds(tmp_path: Path, start: StartHost) -> StartHost:
    (tmp_path / "worlds_to_serve.py").write_text(WORLD)
    (tmp_path / "threaded_worlds.py").write_text(THREADED)

    def start_world(name: str, **config: Any) -> Host:
        host = start(name if ":" in name else f"worlds_to_serve:{name}", **config)
        if "Broken" not in name:
            host.ready()
        return host

    return start_world


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Connections that are closed before the hosts are."""
    with ExitStack() as stack:
        yield stack


def seen_of(frame: dict[str, Any]) -> dict[str, Any]:
    assert frame["type"] == "observation", frame
    observation: dict[str, Any] = frame["data"]["observation"]
    return observation


def clients_of_shards(host: Host, stack: ExitStack, shards: int) -> list[tuple[Client, int]]:
    """Clients until each shard has one, with the shard's pid."""
    found: dict[int, Client] = {}
    while len(found) < shards:
        client = stack.enter_context(host.open())
        found.setdefault(seen_of(client.ask("reset", {}))["shard_pid"], client)
    return [(client, pid) for pid, client in found.items()]


@pytest.mark.parametrize("name", ["Writer", "SyncWriter", "AloneWriter"])
def test_sessions_of_all_processes_act_on_one_state(
    worlds: StartHost, stack: ExitStack, name: str
) -> None:
    host = worlds(name, shards=2, max_sessions=8)
    (one, pid), (other, other_pid) = clients_of_shards(host, stack, 2)
    one.ask("step", {"line": "of one"})
    seen = seen_of(other.ask("step", {"line": "of the other"}))
    assert seen["lines"][-2:] == ["of one", "of the other"]
    assert len({pid, other_pid, seen["state_pid"]}) == 3


def test_a_host_that_cannot_fork_starts_its_state_process_as_a_program(
    worlds: StartHost, stack: ExitStack
) -> None:
    host = worlds("threaded_worlds:Writer", shards=2, max_sessions=8)
    clients = clients_of_shards(host, stack, 2)
    seen = [seen_of(client.ask("step", {"line": "x"})) for client, _ in clients]
    assert len({s["state_pid"] for s in seen}) == 1
    os.kill(seen[0]["state_pid"], signal.SIGKILL)
    assert clients[0][0].receive()["data"]["code"] == "SESSION_ERROR"
    again = seen_of(stack.enter_context(host.open()).ask("reset", {}))
    assert again["lines"] == ["came"]


def test_when_the_state_process_is_killed_every_session_gets_the_reason_and_the_next_epoch_serves(
    worlds: StartHost, stack: ExitStack
) -> None:
    host = worlds("Writer", shards=2, max_sessions=8)
    (idle, _), (busy, _) = clients_of_shards(host, stack, 2)
    state_pid = seen_of(idle.ask("step", {"line": "x"}))["state_pid"]
    busy.send("step", {"line": "wait"})
    os.kill(state_pid, signal.SIGKILL)
    for client in (idle, busy):
        frame = client.receive()
        assert (frame["type"], frame["data"]["code"]) == ("error", "SESSION_ERROR")
        assert f"(pid {state_pid}, epoch 1) is gone" in frame["data"]["message"]
    told = host.note_that_has("shard_exit")
    assert (told["pid"], told["shared_state"], told["generation"]) == (state_pid, True, 1)
    assert os.waitstatus_to_exitcode(told["wait_status"]) == -signal.SIGKILL
    again = seen_of(stack.enter_context(host.open()).ask("reset", {}))
    assert again["lines"] == ["came"]
    assert again["state_pid"] != state_pid


def test_sessions_of_an_exited_shard_are_forgotten(worlds: StartHost, stack: ExitStack) -> None:
    host = worlds("Writer", shards=2, max_sessions=8)
    (one, pid), (other, _) = clients_of_shards(host, stack, 2)
    one.ask("step", {"line": "last words"})
    os.kill(pid, signal.SIGKILL)
    host.note_that_has("shard_exit")
    seen = seen_of(other.ask("step", {"line": "still here"}))
    while seen["readers"] > 1:
        seen = seen_of(other.ask("step", {"line": "still here"}))
    assert "last words" in seen["lines"]
    clients_of_shards(host, stack, 2)
    family = psutil.Process(host.process.pid).children(recursive=True)
    assert len(family) == 3
    assert host.stop() == 0
    assert not any(process.is_running() for process in family)


def test_the_host_fails_when_the_state_cannot_be_created(worlds: StartHost) -> None:
    host = worlds("Broken")
    failed = host.note_that_has("failed")
    assert "LookupError: no board" in str(failed)
    assert host.process.wait(30) == 3
