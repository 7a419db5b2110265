# SPDX-License-Identifier: Apache-2.0
"""The Python SDK against a real daemon, also where OpenEnv's package is installed."""

import asyncio
import threading
from pathlib import Path

import pytest

from openenvd import AsyncClient, Client
from openenvd.client import Session, SessionError, StepResult
from openenvd.client.errors import ApiRefused, DaemonUnreachable, RequestFailed

from .conftest import Machine, eventually, output_of

WITH_UPSTREAM = """\
import sys
import openenv
from openenvd import Client

env = Client(home=sys.argv[1]).launch("echo").wait()
with env.connect() as session:
    assert type(session).__module__.startswith("openenvd."), type(session)
    session.reset()
    print(session.step({"message": "hello"}).observation["echoed_message"])
"""


@pytest.fixture
def home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's home, in which this process starts daemons, too."""
    monkeypatch.setenv("OPENENV_PORT", "0")
    return machine.home


def test_an_environment_is_launched_used_scaled_and_taken_down(home: Path) -> None:
    client = Client(home=home)
    env = client.launch("echo", max_sessions=8).wait()
    assert (env.name, env.state, len(env.replicas)) == ("echo", "READY", 1)
    with env.connect() as session:
        assert isinstance(session, Session)
        assert session.reset(seed=1).observation["echoed_message"] == "Ready to echo."
        result = session.step({"message": "hello"})
        assert isinstance(result, StepResult)
        assert (result.observation["message_length"], result.reward) == (5, 0.5)
        assert session.state()["step_count"] == 1
        with pytest.raises(SessionError) as caught:
            session.step({"message": {}})
        assert caught.value.code == "VALIDATION_ERROR"
    assert len(env.scale(2).wait(timeout=60).replicas) == 2
    assert [each.name for each in client.environments()] == ["echo"]
    env.down().wait()
    assert client.environments() == []


def test_a_rollout_is_iterated_and_waited_for(home: Path, tmp_path: Path) -> None:
    client = Client(home=home)
    env = client.launch("echo").wait()
    rollout = client.rollout(env, out=tmp_path / "episodes", episodes=2000, max_steps=20)
    progress = list(rollout)
    assert progress
    assert progress[-1].data["rollout"]
    assert rollout.wait()["there"] == 2000
    assert "2,000 episodes" in "".join(rollout.logs())


def test_what_fails_says_why(home: Path, tmp_path: Path) -> None:
    client = Client(home=home)
    with pytest.raises(ApiRefused, match="replicas"):
        client.launch("echo", replicas=0)
    with pytest.raises(ApiRefused, match="nowhere"):
        client.launch(tmp_path / "nowhere")
    with pytest.raises(ApiRefused, match="unheard"):
        client.rollout("unheard", out=tmp_path / "episodes")
    (tmp_path / "openenv.yaml").write_text("app: server.app:app\n")  # there is no app
    failed = client.launch(tmp_path, name="again")
    with pytest.raises(RequestFailed):
        list(failed)
    slow = client.launch("echo", name="slow")
    with pytest.raises(TimeoutError):
        slow.wait(timeout=0.001)
    assert slow.wait().state == "READY"


def test_a_client_goes_on_with_the_next_daemon(home: Path, machine: Machine) -> None:
    client = Client(home=home)
    client.launch("echo").wait()
    machine.ok("stop")
    with pytest.raises(DaemonUnreachable, match="no daemon"):
        Client(home=home, start=False).status()
    assert client.environment("echo").name == "echo"


def test_waiting_starts_no_daemon_again(
    home: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    client = Client(home=home)
    launch = client.launch("slow:Never", name="slow")
    machine.ok("stop")
    with pytest.raises(DaemonUnreachable, match="the daemon has exited"):
        launch.wait(timeout=30)
    assert client.find_daemon() is None


async def test_asyncio_waits_for_many_at_once(home: Path) -> None:
    client = AsyncClient(home=home)
    launches = [await client.launch("echo", name=f"echo-{n}", max_sessions=2) for n in range(12)]
    environments = await asyncio.gather(*(launch.wait() for launch in launches))
    assert {each.state for each in environments} == {"READY"}
    async with environments[0].connect() as session:
        assert (await session.reset()).observation["echoed_message"] == "Ready to echo."
        assert (await session.step({"message": "hi"})).reward == pytest.approx(0.2)
    async with client.environment("echo-1").connect(timeout=5.0) as session:
        await session.reset()
    assert (await client.environment("echo-1")).state == "READY"
    with pytest.raises(ApiRefused):
        await client.environment("none")
    scaled = await environments[0].scale(2)
    assert len((await scaled.wait()).replicas) == 2
    await asyncio.gather(*[(await each.down()).wait() for each in environments])
    assert await client.environments() == []


async def test_a_log_that_is_not_followed_any_more_leaves_no_thread(home: Path) -> None:
    client = AsyncClient(home=home)
    env = await (await client.launch("echo")).wait()

    async def follow() -> list[str]:
        return [text async for text in env.logs(follow=True)]

    following = asyncio.create_task(follow())
    await asyncio.to_thread(eventually, streams, within=30)
    await asyncio.sleep(0.5)  # the stream is open, and waits for events
    assert not following.done()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    await asyncio.to_thread(eventually, lambda: not streams(), within=5)


def streams() -> list[str]:
    return [each.name for each in threading.enumerate() if "openenvd stream" in each.name]


def test_sessions_are_ours_where_openenvs_package_is_installed_too(
    both: Path, machine: Machine
) -> None:
    printed = output_of(both, "-c", WITH_UPSTREAM, machine.home, env=machine.environ)
    assert printed == "hello\n"
