# SPDX-License-Identifier: Apache-2.0
"""Sessions: as on OpenEnv's own server, with every provider."""

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

from ..conftest import output_of
from .harness import NAME, Harness, Session

CLIENT = """
import asyncio, sys
from openenv import GenericEnvClient

async def episode(address, steps):
    async with GenericEnvClient(base_url=address) as env:
        await env.reset()
        for _ in range(steps):
            result = await env.step({"do": "environ", "argument": "GREETING"})
            assert result.observation["value"] == "hello", result
        assert (await env.state()).get("step_count") == steps

async def both(address):
    await asyncio.gather(episode(address, 3), episode(address, 5))

asyncio.run(both(sys.argv[1]))
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    env.reset()
    assert env.step({"do": "life"}).observation["value"]
"""

THINKING = """
import sys
from openenv import GenericEnvClient

with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    env.reset()
    env.step({"do": "life"})
    print("thinking", flush=True)
    sys.stdin.readline()
    try:
        print(env.step({"do": "life"}).observation["value"])
    except Exception as exc:
        print(exc)
    env.reset()
    print(env.step({"do": "life"}).observation["value"])
"""


def test_client_of_openenv(harness: Harness, upstream: Path) -> None:
    """OpenEnv's own client resets, steps and asks for the state, in two sessions at once."""
    harness.launched("-e", "GREETING=hello")
    address = harness.environment()["address"]
    output_of(upstream, "-c", CLIENT, address)


def test_a_client_that_thinks_is_told(harness: Harness, upstream: Path) -> None:
    """When a replica is killed between steps, OpenEnv's client gets the reason at its next step."""
    harness.launched()
    words = [str(upstream), "-c", THINKING, harness.environment()["address"]]
    with subprocess.Popen(
        words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "thinking\n"
        harness.tell_server("signal:9")
        harness.until_restarted()
        told, life = client.communicate("\n", timeout=100)[0].splitlines()
    assert "SESSION_NOT_RESET" in told
    assert life == harness.ask("life")


def test_routes(harness: Harness) -> None:
    """The routes of OpenEnv's server answer."""
    harness.launched()
    assert harness.get("/health")[0]["status"] == "healthy"
    assert harness.get("/metadata")[0]["name"]
    assert "action" in harness.get("/schema")[0]


def test_bad_message(harness: Harness) -> None:
    """An invalid message gets an error with its code, and the session goes on."""
    harness.launched()
    with harness.session() as session:
        answer = session.send({"type": "step", "data": {"no_such_field": 1}})
        assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
        assert session.ask("life")


def test_failing_step(harness: Harness) -> None:
    """An exception in a step is reported to its client, and other sessions go on."""
    harness.launched()
    with harness.session() as other, harness.session() as session:
        message = {"type": "step", "data": {"do": "fail", "argument": "no such luck"}}
        answer = session.send(message)
        assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert other.ask("life")


def test_replicas_share_the_sessions(harness: Harness) -> None:
    """Sessions at one address reach every replica."""
    harness.launched("--replicas", "2")
    ids = [replica["id"] for replica in harness.environment()["replicas"]]
    with harness.sessions_at(ids) as sessions:
        assert len({session.ask("life") for session in sessions.values()}) == 2


def test_branches(harness: Harness) -> None:
    """A session is copied at the replica that has it, and returns to a checkpoint."""
    harness.launched("--replicas", "2", "--isolate")

    def steps(session: Session) -> int:
        count: int = session.send({"type": "state"})["data"]["step_count"]
        return count

    with harness.session() as parent, ExitStack() as stack:
        life, pid = parent.ask("life"), parent.ask("pid")
        made = parent.send({"type": "branch", "data": {"count": 3}})["data"]
        checkpoint = parent.send({"type": "checkpoint"})["data"]["checkpoint_id"]
        assert made["by"] == "fork"
        for branch in made["branches"]:
            session = stack.enter_context(harness.attached(branch["session_id"]))
            assert steps(session) == 2
            assert (session.ask("life"), session.replica_id) == (life, parent.replica_id)
            assert session.ask("pid") not in (pid, None)
        assert steps(parent) == 2
        assert parent.ask("pid") == pid
        restored = parent.send({"type": "restore", "data": {"checkpoint_id": checkpoint}})
        assert restored["data"]["observation"]["value"] == pid
        assert steps(parent) == 2


def test_rollout(harness: Harness, tmp_path: Path) -> None:
    """A rollout plays its episodes in the environment."""
    (tmp_path / "one").mkdir(exist_ok=True)
    (tmp_path / "one" / "policies.py").write_text("def greet(_):\n    return {'do': 'life'}\n")
    harness.launched()
    words = ["--episodes", "8", "--concurrency", "4", "--max-steps", "3", "--out", "out"]
    rollout = ["rollout", NAME, "--policy", "policies:greet", *words, "--json"]
    answer = harness.machine.ok(*rollout).json
    assert answer["rollout"]["truncated"] == 8, json.dumps(answer)
