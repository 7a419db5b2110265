# SPDX-License-Identifier: Apache-2.0
"""The agent of an engine of real processes: replicas survive it, and the next one finds them."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from openenvd.environments import run_files
from openenvd.environments.access import ask, check_sessions
from openenvd.environments.agent.agent import Agent
from openenvd.environments.agent.engine_watch import THREADS, EngineWatch
from openenvd.environments.agent.replica import RETRY_SECONDS
from openenvd.environments.agent_client import (
    STRAYS_FILE_NAME,
    EngineAddress,
    ask_agent,
    ask_connected,
    ensure_agent,
)
from openenvd.environments.engines import providers, started_replicas
from openenvd.environments.engines.base import Instance, Labels, ReplicaPlan
from openenvd.environments.engines.instance_logs import CURSOR_FILE_NAME, LogPump, pieces_after
from openenvd.environments.engines.providers import provider_named
from openenvd.environments.run_files import RunFile
from openenvd.environments.shim.client import ShimClient, clean_up_after_shim, read_status_file
from openenvd.environments.shim.files import open_control_socket
from openenvd.environments.sources.program import ContainerImage
from openenvd.environments.strays import look_again, stop_stray, strays_seen
from openenvd.schema import protocol
from openenvd.schema.errors import EngineFailed, InvalidSpec, NotAnswering, ReplicaFailed
from openenvd.schema.layout import Layout, make_private
from openenvd.schema.spec import EnvironmentSpec
from openenvd.system.files.log_files import offset_since

from ..env_host.hosts import until
from .conftest import Started, agents_of, install_engines
from .process_engine import DIRECTORY_VARIABLE, ProcessEngine

NAME = "processes"
AT = EngineAddress(NAME)
SECONDS = 30.0
FAULTS = ("gone", "refuses", "broken", "surprises", "slow", "silent")
SERVER = """
import http.server, os, signal, sys
print("serving", os.environ.get("GREETING", ""), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"status": "healthy"}')
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
# It knows SIGUSR1, as ours do.
SLOW_TO_COUNT = (
    SERVER.replace("signal.SIGTERM", "signal.SIGUSR1")
    .replace(
        "        self.send_response",
        """
        if self.path == "/capacity":
            asked.append(self.path)
            self.send_response(503 if len(asked) < 3 else 200)
            self.end_headers()
            self.wfile.write(b'{"sessions": 0, "waiting": 0, "max_sessions": 7, "shards": []}')
            return
        self.send_response""",
        1,
    )
    .replace("class Handler", "asked = []\nclass Handler")
)
FAILING = """
import pathlib
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    def __init__(self):
        if not pathlib.Path("{licence}").exists():
            raise OSError("no licence")
        super().__init__()
"""
FOREIGN = """
from fastapi import FastAPI
app = FastAPI()
@app.post("/reset")
def reset():
    return {"observation": 0}
"""
ENV_HOST = "from openenvd.env_host.main import main; main()"


class World:
    """A home, an image, and the engine in the test; agents make engines of their own."""

    def __init__(self, home: Path) -> None:
        self.home, self.layout, self.engine = home, Layout(home), ProcessEngine()
        self.image = home / "server.py"
        self.image.write_text(SERVER)

    def fault(self, name: str) -> Path:
        return self.home / f"engine.{name}"

    def launch(self, image: Path | None = None, **fields: Any) -> Started:
        image, address = image or self.image, fields.pop("address", None)
        spec = EnvironmentSpec("sample", str(image), provider=NAME, **fields)
        started = provider_named(NAME, self.home).start(
            spec,
            ContainerImage(str(image), str(image)),
            count=spec.replicas,
            launch_id=secrets.token_hex(8),
            address=address,
        )
        return Started(started)

    def ready(self, image: Path | None = None, **fields: Any) -> RunFile:
        self.launch(image, **fields).wait(SECONDS)
        return run_files.all_of(self.layout.runs)[0]

    def ready_host(self, **config: Any) -> RunFile:
        """Launch an env host that serves what lies in the home."""
        (self.home / "host.py").write_text(ENV_HOST)
        told = protocol.HostConfig("sample", import_paths=(str(self.home),), **config).to_json()
        return self.ready(
            self.home / "host.py", env={protocol.HOST_CONFIG_VARIABLE: json.dumps(told)}
        )

    def add(self, like: RunFile, shares: list[int | None]) -> list[RunFile]:
        """Replicas that a request adds, which are ready."""
        added = provider_named(NAME, self.home).add(
            like, shares, replicas=1 + len(shares), started_by="change"
        )
        Started(added).wait(SECONDS)
        return added

    def start_stray(self) -> Instance:
        plan = plan_of(self.ready())
        labels = replace(plan.labels, replica="gone-0-1", environment="gone")
        return self.engine.start(replace(plan, labels=labels, port=plan.port + 1000))

    @property
    def instance(self) -> Instance:
        [found] = self.engine.list()
        return found

    def tell(self, **fields: Any) -> None:
        self.engine.tell(self.instance, **fields)

    def agents(self) -> list[psutil.Process]:
        return agents_of(self.home)

    def agent(self) -> psutil.Process:
        ensure_agent(self.layout, AT).close()
        [found] = self.agents()
        return found

    def kill_agent(self) -> None:
        found = self.agent()
        found.kill()
        found.wait(SECONDS)

    def stop(self, grace_seconds: float = 0.0) -> None:
        run_files.stop_environment(self.layout.runs, "sample", grace_seconds)


@pytest.fixture
def world(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(home / "engine"))
    installed = home / "installed"
    install_engines(installed, **{NAME: "process_engine:ProcessEngine"})
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{installed}")
    monkeypatch.syspath_prepend(installed)
    made = World(home)
    yield made
    for fault in (*FAULTS, "address"):
        made.fault(fault).unlink(missing_ok=True)
    for process in made.agents():
        process.kill()
    for instance in made.engine.list():
        made.engine.remove(instance)


def plan_of(run_file: RunFile) -> ReplicaPlan:
    return ReplicaPlan.of(run_file.data)


def status_of(run_file: RunFile) -> dict[str, Any]:
    return dict(read_status_file(run_file.run_dir) or {})


def write_status(run_file: RunFile, **fields: Any) -> None:
    """Change what is written down, as a killed agent may have left it."""
    told = status_of(run_file) | fields
    (run_file.run_dir / "status.json").write_text(json.dumps(told))


def link_to(run_file: RunFile) -> ShimClient:
    return ShimClient.connect(run_file.socket_path)


def status_from(client: ShimClient, predicate: Callable[[Any], bool]) -> dict[str, Any]:
    return dict(client.wait(predicate, SECONDS))


def wait_for(run_file: RunFile, predicate: Callable[[Any], bool]) -> dict[str, Any]:
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as client:
        return status_from(client, predicate)


# Starting.


def test_a_server_of_ours_that_is_slow_to_say_its_capacity_is_waited_for(world: World) -> None:
    world.image.write_text(SLOW_TO_COUNT)
    info = wait_for(world.ready(), lambda status: True)["info"]
    assert (info["serving"], info["max_sessions"]) == ("sessions", 7)


def test_why_sessions_fail_and_that_they_do_not_any_more_is_told(world: World) -> None:
    licence = world.home / "licence"
    (world.home / "failing.py").write_text(FAILING.format(licence=licence))
    run_file = world.ready_host(env_class="failing:Sample")
    assert status_of(run_file)["sessions_fail"].startswith("OSError: no licence (")

    def is_told(status: dict[str, Any]) -> bool:
        return (status["sessions_fail"] is None) is licence.exists()

    for is_given in (True, False, True):
        licence.unlink(missing_ok=True)
        if is_given:
            licence.touch()
        with connect(f"ws://127.0.0.1:{run_file.port}/ws") as session:
            with contextlib.suppress(ConnectionClosed):
                session.send('{"type": "reset", "data": {}}')
            session.recv()
        wait_for(run_file, is_told)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no image", r"there is no image .*server.py \(touch "),
        ("no library", "not_installed"),
        ("never answered", r"does not answer \(start it\)"),
    ],
)
def test_what_keeps_an_engine_from_starting_fails_the_launch_with_the_remedy(
    world: World, fault: str, told: str
) -> None:
    if fault == "no image":
        world.image.unlink()
    elif fault == "no library":
        install_engines(world.home / "installed", **{NAME: "not_installed:Engine"})
    else:
        world.fault("gone").touch()
    started = world.launch()
    with pytest.raises(ReplicaFailed, match=told):
        started.wait(SECONDS)
    started.stop()
    install_engines(world.home / "installed", **{NAME: "process_engine:ProcessEngine"})


def test_what_no_engine_was_asked_to_start_is_stopped_without_its_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.5)
    world.fault("gone").touch()
    world.launch()
    world.stop()
    assert list(world.layout.runs.iterdir()) == []


def test_what_never_answers_is_told_with_its_address(world: World) -> None:
    world.image.write_text("import time\ntime.sleep(600)")
    [run_file] = world.launch()
    why = wait_for(run_file, lambda status: status["waiting"])["waiting"]
    told = str(started_replicas.not_ready(run_file, 3.0, why))
    assert re.search(r"nothing answers at .*/health: .*must listen on 0\.0\.0\.0", told)


# Running.


@pytest.mark.parametrize("away", ["engine", "agent"])
def test_an_exit_is_told_when_who_was_away_is_back(world: World, away: str) -> None:
    run_file = world.ready()
    pid = world.instance.pid
    assert pid is not None
    if away == "engine":
        world.fault("gone").touch()
        wait_for(run_file, lambda status: status["problem"] is not None)
    else:
        world.kill_agent()
    os.kill(pid, signal.SIGKILL)
    if away == "engine":
        wait_for(run_file, lambda status: "the replica does not answer" in status["problem"])
    world.fault("gone").unlink(missing_ok=True)
    status = wait_for(run_file, lambda status: status["state"] == "exited")
    assert status["exit"]["signal"] == "SIGKILL"


def test_how_far_an_instance_is_on_its_way_is_no_problem(world: World) -> None:
    """Clients who wait for it are told what keeps it from running, and nothing else."""
    world.image.write_text("import time\ntime.sleep(600)")
    [run_file] = world.launch()
    wait_for(run_file, lambda status: status["waiting"])
    world.tell(state="starting", waiting="preparing", is_on_its_way=True)
    told: list[str | None] = []

    def is_told(status: dict[str, Any]) -> bool:
        told.append(status["problem"])
        return bool(status["problem"] == "no node has room")

    with link_to(run_file) as client:
        status_from(client, lambda status: status["waiting"] == "preparing")
        world.tell(waiting="no node has room", is_on_its_way=False)
        status_from(client, is_told)
    assert set(told) == {None, "no node has room"}


@pytest.mark.parametrize("fault", ["gone", "refuses", "broken"])
def test_an_engine_that_fails_or_is_gone_loses_no_replica(world: World, fault: str) -> None:
    run_file = world.ready()
    [before] = world.engine.list()
    world.kill_agent()
    world.fault(fault).touch()
    run_files.revive(run_file)
    with link_to(run_file) as client:
        status = status_from(client, lambda status: status["problem"] is not None)
        time.sleep(2 * RETRY_SECONDS)  # for it to be asked again
        assert client.status["state"] == status["state"] == "ready"
        world.fault(fault).unlink()
        status = status_from(client, lambda status: status["problem"] is None)
    assert (status["state"], status["generation"]) == ("ready", 1)
    assert world.engine.list() == [before]


def test_a_surprise_of_its_library_is_told_and_logged_and_ends_no_agent(world: World) -> None:
    run_file = world.ready()
    agent = world.agent()
    surprises = world.fault("surprises")
    surprises.touch()
    with pytest.raises(EngineFailed, match="AttributeError"):
        ask_agent(world.layout, AT, "list")
    world.engine.signal(world.engine.find(plan_of(run_file)), signal.SIGKILL)  # type: ignore[arg-type]
    status = wait_for(run_file, lambda status: status["problem"] is not None)
    assert "'NoneType' object has no attribute 'items'" in status["problem"]
    assert "Traceback" in world.layout.agent_log(NAME).read_text()
    surprises.unlink()
    status = wait_for(run_file, lambda status: status["exit"] and not status["problem"])
    assert status["exit"]["signal"] == "SIGKILL"
    assert world.agent() == agent


# Stopping.


def test_a_stop_is_hastened_by_another_with_less_grace(world: World) -> None:
    world.image.write_text(SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    run_file = world.ready()
    with link_to(run_file) as client:
        client.send("stop", grace_seconds=600.0)
        client.wait(lambda status: status["state"] == "stopping", SECONDS)
        time.sleep(0.5)  # for the engine to be asked
        client.send("stop", grace_seconds=0.0)
        status = status_from(client, lambda status: status["state"] == "stopped")
    assert status["exit"]["signal"] == "SIGKILL"
    assert world.engine.list() == []


async def test_an_engine_is_asked_however_many_stops_give_a_long_grace(world: World) -> None:
    engine, plan = world.engine, plan_by_hand(world)
    watch = EngineWatch(engine, lambda _: None, lambda _: None)
    folders = [engine.root / f"openenvd-{number}" for number in range(THREADS + 1)]
    for folder in folders:  # that have not begun to run yet, and so cannot be stopped
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    stops = [
        asyncio.create_task(watch.call_long(engine.stop, instance, 600.0))
        for instance in engine.list()
    ]
    await asyncio.sleep(0.1)
    assert len(await asyncio.wait_for(watch.call(engine.list), SECONDS)) == len(folders)
    for folder in folders:
        shutil.rmtree(folder)
    await asyncio.wait_for(asyncio.gather(*stops), SECONDS)
    watch.close()


def test_a_stop_during_a_start_that_is_refused_is_not_forgotten(world: World) -> None:
    slow = world.fault("slow")
    slow.touch()
    world.launch(world.home / "nowhere.py")
    [run_file] = run_files.all_of(world.layout.runs)
    with link_to(run_file) as client:
        client.send("stop", grace_seconds=0.0)
        client.wait(lambda status: status["state"] == "stopping", SECONDS)
        slow.unlink()
        status = status_from(client, lambda status: status["state"] != "stopping")
    assert status["state"] == "stopped"


def test_nothing_is_left_of_what_was_refused_after_it_was_made(world: World) -> None:
    run_file = world.ready()
    world.kill_agent()
    world.image.unlink()  # so that the next agent is refused, which knows of no instance
    write_status(run_file, state="starting", instance=None)
    wait_for(run_file, lambda status: status["state"] == "exited")
    world.image.write_text(SERVER)  # the engine reads it to describe what it has
    world.stop()
    assert world.engine.list() == []


@pytest.mark.parametrize("fault", ["refuses", "broken"])
def test_nothing_is_left_where_a_stop_was_answered_with_an_error(world: World, fault: str) -> None:
    run_file = world.ready()
    world.kill_agent()
    world.fault(fault).touch()
    run_files.revive(run_file)
    with link_to(run_file) as client:
        client.send("stop", grace_seconds=0.0)
        client.wait(lambda status: bool(status["problem"]), SECONDS)
        time.sleep(2 * RETRY_SECONDS)
        assert client.status["state"] == "stopping"
        world.fault(fault).unlink()
        client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert world.engine.list() == []


@pytest.mark.parametrize("operation", ["drain", "leave"])
def test_a_silent_server_is_asked_to_drain_again_and_its_engine_not_blamed(
    world: World, operation: str
) -> None:
    world.image.write_text(SERVER.replace("signal.SIGTERM", "signal.SIGUSR1"))
    run_file = world.ready()
    world.ready()
    [other] = [each for each in run_files.all_of(world.layout.runs) if each != run_file]
    world.fault("silent").touch()
    with link_to(run_file) as client:
        client.send(operation, timeout_seconds=3600.0)
        status = status_from(client, lambda status: bool(status["problem"]))
        assert status["problem"] == "nothing answers at its address"
        assert wait_for(other, lambda status: True)["problem"] is None
        world.fault("silent").unlink()
        status = status_from(client, lambda status: status["state"] == "stopped")
    assert status["exit"]["exit_code"] == 0
    assert "Traceback" not in world.layout.agent_log(NAME).read_text()


DAY = 86_400.0
# Of the agent's Python: its `time.time()` is off by what a file says.
STEPPED_CLOCK = """
import time
_now = time.time
time.time = lambda: _now() + float(open({file!r}).read())
"""


@pytest.fixture
def offset(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how far agents' wall clocks are off; it is written whole."""
    file = tmp_path / "offset"
    file.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(STEPPED_CLOCK.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    return file


def step_clock(offset: Path, seconds: float) -> None:
    new = offset.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(offset)


def test_a_clock_that_steps_ahead_ends_no_drain(world: World, offset: Path) -> None:
    says_so = "SIGUSR1, lambda *_: print('told', flush=True)); (lambda"
    world.image.write_text(SERVER.replace("SIGTERM, lambda", says_so))
    run_file = world.ready()
    with link_to(run_file) as client:
        client.send("drain", timeout_seconds=600.0)
        client.wait(lambda status: status["state"] == "draining", SECONDS)
    log = Path(run_file.log_path)
    until(lambda: "told" in log.read_text())
    world.kill_agent()
    step_clock(offset, DAY)
    status = wait_for(run_file, lambda status: status["pid"] is not None)
    until(lambda: log.read_text().count("told") == 2 or not is_draining(run_file))
    assert is_draining(run_file), status


def is_draining(run_file: RunFile) -> bool:
    return bool((read_status_file(run_file.run_dir) or {})["state"] == "draining")


# Logs.


def plan_by_hand(world: World) -> ReplicaPlan:
    labels = Labels("home", "sample", "sample-0-1", "1")
    return ReplicaPlan(labels=labels, image=str(world.image), host="127.0.0.1", port=1)


def instance_that_prints(world: World, text: str) -> Path:
    """The folder of an instance that has printed this so far."""
    plan = plan_by_hand(world)
    folder = world.engine.root / plan.name
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    (folder / "log").write_text(text)
    return folder


def pump_of(world: World, instance: Instance) -> LogPump:
    log = str(world.home / "log")
    return LogPump(world.engine, instance, run_dir=world.home, log_path=log, max_bytes=10**6)


async def test_a_piece_whose_cursor_was_not_written_is_not_written_twice(world: World) -> None:
    folder = instance_that_prints(world, "one\n")
    cursor = world.home / CURSOR_FILE_NAME
    first = pump_of(world, world.instance)
    await asyncio.to_thread(until, lambda: cursor.exists() and '"4"' in cursor.read_text())
    before = cursor.read_text()
    (folder / "log").write_text("one\ntwo\n")
    await asyncio.to_thread(until, lambda: cursor.read_text() != before)
    first.stop()
    cursor.write_text(before)  # as it is when the agent is killed between log and cursor
    (folder / "log").write_text("one\ntwo\nthree\n")
    second = pump_of(world, world.instance)
    (folder / "exit").write_text("0")
    await asyncio.wait_for(second.ended.wait(), SECONDS)
    assert (world.home / "log").read_text() == "one\ntwo\nthree\n"


async def test_a_log_is_marked_with_the_times_of_an_engine_that_has_some(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that `openenv logs --since` is right, also of what was printed while no agent ran."""
    frames = [b"2026-05-04T10:00:00Z one\n", b"2026-05-04T11:00:00Z two\n"]
    monkeypatch.setattr(world.engine, "logs", lambda *_: pieces_after(frames, None))
    (instance_that_prints(world, "") / "exit").write_text("0")
    await asyncio.wait_for(pump_of(world, world.instance).ended.wait(), SECONDS)
    log, between = world.home / "log", datetime(2026, 5, 4, 10, 30, tzinfo=UTC).timestamp()
    assert log.read_text()[offset_since(log, between) :] == "two\n"


async def test_a_surprise_of_its_library_ends_no_log(world: World) -> None:
    (instance_that_prints(world, "one\n") / "exit").write_text("0")
    instance = world.instance
    world.fault("surprises").touch()
    (world.home / CURSOR_FILE_NAME).write_text(json.dumps({"instance": instance.id}))  # damaged
    pump = pump_of(world, instance)
    await asyncio.sleep(0.1)
    world.fault("surprises").unlink()
    await asyncio.wait_for(pump.ended.wait(), SECONDS)
    assert (world.home / "log").read_text() == "one\n"


# The agent is killed.


def test_a_replica_that_was_not_started_yet_is_started_by_the_next_agent(world: World) -> None:
    run_file = world.ready()
    world.kill_agent()
    world.engine.remove(world.instance)
    write_status(run_file, state="starting", instance=None, pid=None)
    wait_for(run_file, lambda status: status["state"] == "ready")
    assert len(world.engine.list()) == 1


def test_an_instance_that_was_removed_while_no_agent_ran_is_lost(world: World) -> None:
    run_file = world.ready()
    instance = world.instance
    world.kill_agent()
    world.engine.remove(instance)
    status = wait_for(run_file, lambda status: status["state"] == "exited")
    assert status["exit"]["kind"] == "lost"
    assert f"processes does not have {instance.id[:40]} any more" in status["exit"]["evidence"]


def test_a_stop_goes_on_when_the_agent_is_killed_while_it_stops(world: World) -> None:
    world.image.write_text(SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    run_file = world.ready()
    stopping = threading.Thread(
        target=run_files.stop_environment, args=(world.layout.runs, "sample", 3.0)
    )
    stopping.start()
    until(lambda: (read_status_file(run_file.run_dir) or {}).get("state") == "stopping")
    world.kill_agent()
    stopping.join(SECONDS)
    assert not stopping.is_alive()
    assert world.engine.list() == []
    assert list(world.layout.runs.iterdir()) == []


def test_what_was_removed_and_not_yet_reported_is_stopped(world: World) -> None:
    run_file = world.ready()
    world.kill_agent()
    world.engine.remove(world.instance)
    write_status(run_file, state="stopping")
    world.stop()
    assert list(world.layout.runs.iterdir()) == []


def test_cleaning_up_after_a_shim_leaves_replica_and_agent_of_an_engine(world: World) -> None:
    run_file = world.ready()
    agent = world.agent()
    (run_file.run_dir / "replica.json").unlink()  # as for a folder whose run file was lost
    clean_up_after_shim(run_file.run_dir)
    assert agent.is_running()
    assert ask(run_file.address, "/health", 5.0)


def test_a_run_file_that_nobody_can_use_keeps_no_other_from_being_served(world: World) -> None:
    run_file = world.ready()
    world.kill_agent()
    other = world.layout.run_dir("other-0-1")
    other.mkdir()
    data = {**run_file.data, "environment": "other", "replica_id": other.name, "plan": {}}
    (other / "replica.json").write_text(json.dumps(data))
    assert wait_for(run_file, lambda status: status["state"] == "ready")


# The agent itself.


def test_a_replica_that_is_asked_for_twice_at_once_is_served_once(world: World) -> None:
    run_file = world.ready()
    world.kill_agent()
    run_file.run_dir.rename(world.home / "aside")
    with ensure_agent(world.layout, AT) as first, ensure_agent(world.layout, AT) as second:
        for client in (first, second):
            ask_connected(client, AT.engine, "list")  # so that both are connected
        agent = world.agent()
        agent.suspend()
        (world.home / "aside").rename(run_file.run_dir)
        fields = {"run_dir": str(run_file.run_dir)}
        asked = [
            threading.Thread(target=ask_connected, args=(client, AT.engine, "adopt"), kwargs=fields)
            for client in (first, second)
        ]
        for thread in asked:
            thread.start()
        time.sleep(0.5)  # for both questions to wait in its sockets
        agent.resume()
        for thread in asked:
            thread.join(SECONDS)
        sockets = [str(each.laddr) for each in agent.net_connections("unix")]
    assert sockets.count(run_file.socket_path) == 1


def test_variables_are_in_the_run_file_alone(world: World) -> None:
    """Not in what is told of a replica, in a log, or on a command line, which others may see."""
    run_file = world.ready(env={"API_TOKEN": "hush-hush"})
    world.fault("surprises").touch()
    with pytest.raises(EngineFailed):
        ask_agent(world.layout, AT, "list")
    world.fault("surprises").unlink()
    told = json.dumps([wait_for(run_file, lambda _: True), ask_agent(world.layout, AT, "list")])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told += " ".join(process.cmdline())
    files = [
        path
        for path in world.home.rglob("*")
        if path.is_file() and world.engine.root not in path.parents
    ]
    having = {path.name for path in files if "hush-hush" in path.read_text(errors="replace")}
    assert having == {"replica.json"}
    assert "hush-hush" not in told
    assert "AttributeError" in world.layout.agent_log(AT.key).read_text()


def test_agents_that_are_started_at_the_same_time_are_one(world: World) -> None:
    threads = [
        threading.Thread(target=ask_agent, args=(world.layout, AT, "list")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    world.agent()  # of which there is one


def test_an_agent_whose_socket_is_gone_makes_way_for_the_next(world: World) -> None:
    run_file = world.ready()
    first = world.agent()
    world.layout.agent_socket(NAME).unlink()
    wait_for(run_file, lambda status: status["agent"]["pid"] != first.pid)
    first.wait(SECONDS)


async def test_an_agent_without_replicas_ends(world: World) -> None:
    make_private(world.layout.sockets)
    make_private(world.layout.engines)
    make_private(world.layout.engines / NAME)
    path = world.layout.agent_socket(NAME)
    control = open_control_socket(str(path))
    await asyncio.wait_for(
        Agent(world.layout, AT, world.engine, control, idle_seconds=0.0).run(), SECONDS
    )
    assert not path.exists()
    world.engine.close()
    for thread in threading.enumerate():
        if thread.name == "changes":  # which asks the engine, and so makes its folder
            await asyncio.to_thread(thread.join, SECONDS)
            assert not thread.is_alive()


# Strays.


def test_strays_are_listed_and_stopped_by_who_they_are(world: World) -> None:
    world.start_stray()
    [seen] = until(lambda: strays_seen(world.layout))
    assert (seen["provider"], seen["replica"]) == (NAME, "gone-0-1")
    ask_agent(world.layout, AT, "list")
    assert [each["environment"] for each in strays_seen(world.layout)] == ["gone"]
    for _ in range(2):  # once more is fine
        stop_stray(world.layout, seen)
    assert world.instance.labels.environment == "sample"
    until(lambda: strays_seen(world.layout) == [])


def test_agents_look_for_strays_when_asked_and_say_why_they_cannot(world: World) -> None:
    world.start_stray()
    world.kill_agent()
    (world.layout.engines / NAME / STRAYS_FILE_NAME).write_text('{"strays": null}')  # damaged
    assert strays_seen(world.layout) == []
    assert list(look_again(world.layout)) == []
    assert [each["replica"] for each in strays_seen(world.layout)] == ["gone-0-1"]
    world.fault("gone").touch()
    [(name, why)] = look_again(world.layout)
    assert name == NAME
    assert "does not answer" in why
    with pytest.raises(EngineFailed, match="does not answer") as raised:
        ask_agent(world.layout, AT, "list")
    assert raised.value.hint == "start it"


def test_a_stray_of_an_engine_that_was_never_used_starts_no_agent(world: World) -> None:
    with pytest.raises(EngineFailed, match="used no engine"):
        stop_stray(world.layout, {"provider": "elsewhere", "id": "x"})
    assert not world.layout.engines.exists()


def test_a_replica_that_is_known_is_no_stray_and_alone_at_its_port(world: World) -> None:
    run_file = world.ready()
    instance = world.instance
    with pytest.raises(EngineFailed, match="no stray"):
        ask_agent(world.layout, AT, "stop", instance=instance.id, grace_seconds=1.0)
    with pytest.raises(InvalidSpec, match="only behind the gateway") as raised:
        world.add(run_file, [None])
    remedy = f"openenv launch {world.image} --name sample --provider {NAME} --gateway --replicas 2"
    assert str(raised.value.hint).startswith(remedy)
    assert world.engine.list() == [instance]


# Addresses.


@pytest.mark.parametrize(
    ("told", "found"),
    [("http://127.0.0.2:{port}", "127.0.0.2"), ("http://127.0.0.3:1", "127.0.0.1")],
)
def test_a_replica_is_reached_where_it_answers_and_the_next_agent_knows(
    world: World, told: str, found: str
) -> None:
    world.image.write_text(SERVER.replace('("127.0.0.1", int', '("", int'))
    world.fault("address").write_text(told)
    run_file = world.ready()
    assert run_files.endpoint_of(run_file) == (found, run_file.port)
    world.kill_agent()
    status = wait_for(run_file, lambda status: status["state"] == "ready")
    assert (status["host"], status["port"]) == (found, run_file.port)


# Scaling.


def test_a_drain_outlives_the_agent(world: World) -> None:
    run_file = world.ready()
    with link_to(run_file) as client:
        client.send("drain", timeout_seconds=SECONDS)
        client.wait(lambda status: bool(status.get("is_draining")), SECONDS)
    instance = world.instance
    world.kill_agent()
    run_files.revive(run_file)
    world.engine.signal(instance, signal.SIGTERM)
    wait_for(run_file, lambda status: status["state"] == "stopped")
    assert world.engine.list() == []


def test_another_share_of_the_sessions_holds_from_the_next_start_on(world: World) -> None:
    run_file = world.ready(max_sessions=6)
    providers.share_out([run_file], [4])
    world.engine.signal(world.instance, signal.SIGKILL)
    wait_for(run_file, lambda status: status["state"] == "exited")
    with link_to(run_file) as client:
        client.send("start")
        client.wait(lambda status: status["state"] == "ready", SECONDS)
    plan = json.loads((world.engine.root / world.instance.id / "plan.json").read_text())
    assert json.loads(plan["env"][protocol.HOST_OPTIONS_VARIABLE])["max_sessions"] == 4


def test_an_app_without_sessions_is_told_with_a_route_to_try(world: World) -> None:
    (world.home / "foreign.py").write_text(FOREIGN)
    run_file = world.ready_host(app_candidates=("foreign:app",))
    info = wait_for(run_file, lambda status: True)["info"]
    assert (info["serving"], info["route"]) == ("http", "POST /reset {}")
    assert info["notes"] == [f"{protocol.NO_SESSIONS}; it is served as it is"]
    with pytest.raises(NotAnswering, match=protocol.NO_SESSIONS):
        check_sessions(run_file)
