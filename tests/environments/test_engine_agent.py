# SPDX-License-Identifier: Apache-2.0
"""The agent of an engine of real processes: replicas survive it, and the next one finds them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from openenvd.environments import run_files, scaling
from openenvd.environments.agent.agent import Agent
from openenvd.environments.agent.engine_watch import THREADS, EngineWatch
from openenvd.environments.agent.log_pump import CURSOR_FILE_NAME, LogPump
from openenvd.environments.agent.replica import CAPACITY_SECONDS, RETRY_SECONDS
from openenvd.environments.agent.replica_status import ReplicaStatus
from openenvd.environments.agent_client import (
    STRAYS_FILE_NAME,
    EngineAddress,
    ask_agent,
    ensure_agent,
)
from openenvd.environments.engines import started_replicas
from openenvd.environments.engines.base import Instance, Labels, ReplicaPlan
from openenvd.environments.engines.engine_provider import EngineReplicas
from openenvd.environments.engines.providers import provider_named
from openenvd.environments.engines.registry import MORE_VARIABLE
from openenvd.environments.http_get import ask, check_sessions
from openenvd.environments.run_files import RunFile
from openenvd.environments.shim.client import ShimClient, clean_up_after_shim, read_status_file
from openenvd.environments.shim.files import open_control_socket
from openenvd.environments.sources.program import Program
from openenvd.environments.strays import look_again, stop_stray, strays_seen
from openenvd.schema.errors import (
    EngineFailed,
    InvalidSpec,
    NotAnswering,
    NotReady,
    ReplicaFailed,
    UnknownProvider,
)
from openenvd.schema.layout import Layout, make_private
from openenvd.schema.protocol import (
    HOST_CONFIG_VARIABLE,
    HOST_OPTIONS_VARIABLE,
    NO_SESSIONS,
    REPLICA_HEADER,
    HostConfig,
)
from openenvd.schema.spec import EnvironmentSpec

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


@pytest.fixture
def engine(home: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessEngine]:
    """The engine, in the test; agents make their own. Nothing of it runs afterwards."""
    here = Path(__file__).parent
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(home / "engine"))
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setenv(MORE_VARIABLE, f"{NAME}=process_engine:ProcessEngine")
    made = ProcessEngine()
    yield made
    for fault in (*FAULTS, "address"):
        (home / f"engine.{fault}").unlink(missing_ok=True)
    for process in filter(lambda each: is_agent(each, layout), psutil.process_iter()):
        process.kill()
    for instance in made.list():
        made.remove(instance)


@pytest.fixture
def image(home: Path) -> Path:
    path = home / "server.py"
    path.write_text(SERVER)
    return path


def launch(home: Path, image: Path, address: str | None = None, **fields: Any) -> EngineReplicas:
    spec = EnvironmentSpec("sample", str(image), provider=NAME, **fields)
    program = Program(Path("/"), Path("/"), HostConfig("sample"), image=str(image))
    started = provider_named(NAME, home).start(
        spec, program, launch_id=secrets.token_hex(8), on_started=lambda _: None, address=address
    )
    assert isinstance(started, EngineReplicas)
    return started


def ready(home: Path, image: Path, **fields: Any) -> RunFile:
    """Launch one replica, and leave it running."""
    started = launch(home, image, **fields)
    started.wait_until_ready(SECONDS, lambda _: None)
    started.release()
    return run_files.all_of(Layout(home).runs)[0]


def plan_of(run_file: RunFile) -> ReplicaPlan:
    return ReplicaPlan.from_json(run_file.data["plan"])


def agent_of(layout: Layout) -> psutil.Process:
    """The agent's process."""
    with ensure_agent(layout, AT):
        pass
    [found] = [each for each in psutil.process_iter() if is_agent(each, layout)]
    return found


def is_agent(process: psutil.Process, layout: Layout) -> bool:
    try:
        words = process.cmdline()
        return "openenvd: agent" in " ".join(words) and process.environ().get(
            "OPENENV_HOME"
        ) == str(layout.home)
    except psutil.Error:
        return False


def kill_agent(layout: Layout) -> None:
    found = agent_of(layout)
    found.kill()
    found.wait(SECONDS)


def until(predicate: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := predicate()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


def wait_for(run_file: RunFile, predicate: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as client:
        return client.wait(predicate, SECONDS)


# Starting.


def test_a_server_of_ours_that_is_slow_to_say_its_capacity_is_waited_for(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(SLOW_TO_COUNT)
    info = wait_for(ready(home, image), lambda status: True)["info"]
    assert (info["serving"], info["max_sessions"]) == ("sessions", 7)


def test_why_sessions_fail_and_that_they_do_not_any_more_is_told(
    home: Path, engine: ProcessEngine
) -> None:
    (home / "failing.py").write_text(FAILING.format(licence=home / "licence"))
    (home / "host.py").write_text(ENV_HOST)
    config = HostConfig("sample", env_class="failing:Sample", import_paths=(str(home),))
    env = {HOST_CONFIG_VARIABLE: json.dumps(config.to_json())}
    started = launch(home, home / "host.py", env=env)
    [replica] = started.wait_until_ready(SECONDS, lambda _: None)
    started.release()
    assert (replica.sessions_fail or "").startswith("OSError: no licence (")
    [run_file] = run_files.all_of(Layout(home).runs)

    def is_told(status: dict[str, Any]) -> bool:
        return (status["sessions_fail"] is None) is (home / "licence").exists()

    for is_given in (True, False, True):
        (home / "licence").unlink(missing_ok=True)
        if is_given:
            (home / "licence").touch()
        with connect(f"ws://127.0.0.1:{run_file.port}/ws") as session:
            with contextlib.suppress(ConnectionClosed):
                session.send('{"type": "reset", "data": {}}')
            session.recv()
        wait_for(run_file, is_told)


def test_an_app_without_sessions_is_told_with_a_route_to_try(
    home: Path, engine: ProcessEngine
) -> None:
    (home / "foreign.py").write_text(FOREIGN)
    (home / "host.py").write_text(ENV_HOST)
    config = HostConfig("sample", app_candidates=("foreign:app",), import_paths=(str(home),))
    run_file = ready(
        home, home / "host.py", env={HOST_CONFIG_VARIABLE: json.dumps(config.to_json())}
    )
    info = wait_for(run_file, lambda status: True)["info"]
    assert (info["serving"], info["route"]) == ("http", "POST /reset")
    assert info["notes"] == [f"{NO_SESSIONS}; it is served as it is"]
    with pytest.raises(NotAnswering, match=NO_SESSIONS):
        check_sessions(run_file)


def test_what_the_engine_refuses_fails_the_launch_with_its_words_and_the_remedy(
    home: Path, engine: ProcessEngine
) -> None:
    started = launch(home, home / "nowhere.py")
    with pytest.raises(ReplicaFailed, match=r"there is no image .*nowhere.py \(touch "):
        started.wait_until_ready(SECONDS, lambda _: None)
    started.stop()


def test_an_engine_whose_library_is_missing_refuses_each_launch_at_once(
    home: Path, image: Path, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MORE_VARIABLE, f"{NAME}=not_installed:Engine")
    started = launch(home, image)
    with pytest.raises(ReplicaFailed, match="not_installed"):
        started.wait_until_ready(SECONDS, lambda _: None)
    started.stop()
    monkeypatch.setenv(MORE_VARIABLE, f"{NAME}=process_engine:ProcessEngine")


def test_an_engine_that_has_never_answered_fails_a_launch_with_the_remedy(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    (home / "engine.gone").touch()
    started = launch(home, image)
    with pytest.raises(ReplicaFailed, match=r"does not answer \(start it\)"):
        started.wait_until_ready(SECONDS, lambda _: None)
    started.stop()


def test_what_no_engine_was_asked_to_start_is_stopped_without_its_answer(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.5)
    (home / "engine.gone").touch()
    launch(home, image).release()
    run_files.stop_environment(layout.runs, "sample", 0.0)
    assert list(layout.runs.iterdir()) == []


def test_an_engine_runs_images_alone(home: Path, engine: ProcessEngine) -> None:
    spec = EnvironmentSpec("sample", "echo", provider=NAME)
    program = Program(Path("/"), Path("/"), HostConfig("sample"))
    with pytest.raises(InvalidSpec, match="runs images"):
        provider_named(NAME, home).start(spec, program, launch_id="1", on_started=lambda _: None)


def test_an_unknown_provider_is_refused_with_the_names_that_there_are(home: Path) -> None:
    with pytest.raises(UnknownProvider) as raised:
        provider_named("nowhere", home)
    assert "local" in str(raised.value.hint)


def test_what_never_answers_is_told_with_where_it_was_asked(
    home: Path, image: Path, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(started_replicas, "PATIENT_SECONDS", 1.0)
    image.write_text("import time\ntime.sleep(600)")
    started = launch(home, image)
    monkeypatch.setattr(started_replicas, "LASTING_SECONDS", 0.5)
    told: list[str] = []
    lasting: list[tuple[str, float]] = []
    with pytest.raises(
        NotReady, match=r"nothing answers at .*/health: .*must listen on 0\.0\.0\.0"
    ):
        started.wait_until_ready(
            3.0, lambda _: None, told.append, lambda *given: lasting.append(given)
        )
    assert told[0].startswith("1 of 1 replicas wait: nothing answers at ")
    assert lasting[0][0].startswith("0 of 1 replicas are ready; 1 waits: nothing answers at ")
    assert 0 < lasting[0][1] < 3
    started.stop()


# Running.


def test_a_message_that_is_none_is_answered_with_an_error(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        client.connect(run_file.socket_path)
        client.sendall(b'{"op": "dance"}\n[1]\n')
        lines = client.makefile("rb")
        answers = [json.loads(lines.readline()) for _ in range(3)]
    assert [answer["event"] for answer in answers].count("error") == 2


def test_what_ends_while_the_engine_is_gone_is_told_when_it_is_back(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    pid = engine.list()[0].pid
    assert pid is not None
    gone = home / "engine.gone"
    gone.touch()
    wait_for(run_file, lambda status: status["problem"] is not None)
    os.kill(pid, signal.SIGKILL)
    gone.unlink()
    status = wait_for(run_file, lambda status: status["state"] == "exited")
    assert status["exit"]["signal"] == "SIGKILL"


def test_one_that_is_silent_is_lost_when_its_server_does_not_answer_either(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    [instance] = engine.list()
    assert instance.pid is not None
    silent = {"is_silent": True, "state": "running", "waiting": "job 7 has not been heard of"}
    engine.tell(instance, **silent)
    status = wait_for(run_file, lambda status: status["problem"] is not None)
    assert (status["state"], status["problem"]) == ("ready", "job 7 has not been heard of")
    os.kill(instance.pid, signal.SIGKILL)
    time.sleep(2 * CAPACITY_SECONDS)  # it may only be busy: it is asked several times
    assert wait_for(run_file, lambda _: True)["state"] == "ready"
    status = wait_for(run_file, lambda status: status["state"] == "exited")
    assert (status["exit"]["kind"], status["exit"]["evidence"]) == ("lost", status["problem"])
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("start")
        status = client.wait(lambda status: status["state"] == "ready", SECONDS)
    assert status["pid"] != instance.pid


def test_what_its_engine_begins_anew_is_the_same_instance_in_the_next_generation(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    [instance] = engine.list()
    engine.tell(instance, state="starting", waiting="job 7 waits, requeued", runs=1)
    status = wait_for(run_file, lambda status: status["waiting"] is not None)
    assert (status["state"], status["generation"], status["restarts"]) == ("starting", 2, 1)
    assert status["last_exit"]["evidence"] == "job 7 waits, requeued"
    engine.tell(instance, runs=0, waiting="as of its last run")
    wait_for(run_file, lambda status: status["waiting"] == "as of its last run")
    engine.tell(instance, runs=1)
    status = wait_for(run_file, lambda status: status["state"] == "ready")
    assert (status["instance"], status["generation"]) == (instance.id, 2)
    engine.tell(instance, runs=2, why_anew="Slurm has requeued job 7")  # it runs again already
    status = wait_for(run_file, lambda status: status["generation"] == 3)
    assert status["last_exit"]["evidence"] == "Slurm has requeued job 7"


def test_how_far_an_instance_is_on_its_way_is_no_problem(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    """Clients who wait for it are told what keeps it from running, and nothing else."""
    run_file = ready(home, image)
    [instance] = engine.list()
    engine.tell(instance, state="starting", waiting="preparing", is_on_its_way=True, runs=1)
    wait_for(run_file, lambda status: status["waiting"] == "preparing")
    told: list[str | None] = []

    def is_told(status: dict[str, Any]) -> bool:
        told.append(status["problem"])
        return bool(status["problem"] == "no node has room")

    engine.tell(instance, waiting="no node has room", is_on_its_way=False)
    wait_for(run_file, is_told)
    assert set(told) == {None, "no node has room"}


def test_when_its_engine_ends_it_is_told(home: Path, image: Path, engine: ProcessEngine) -> None:
    run_file = ready(home, image)
    [instance] = engine.list()
    engine.tell(instance, ends_at=2e9, replace_at=1.9e9)
    status = wait_for(run_file, lambda status: status["ends_at"] is not None)
    assert (status["ends_at"], status["replace_at"]) == (2e9, 1.9e9)
    known = ReplicaStatus.from_json(status)  # of another boot, it may be
    assert (known.ends_at, known.replace_at) == (None, None)


@pytest.mark.parametrize("fault", ["gone", "refuses", "broken"])
def test_an_engine_that_answers_with_an_error_or_not_at_all_loses_no_replica(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine, fault: str
) -> None:
    run_file = ready(home, image)
    [before] = engine.list()
    kill_agent(layout)
    (home / f"engine.{fault}").touch()
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as client:
        status = client.wait(lambda status: status["problem"] is not None, SECONDS)
        time.sleep(2 * RETRY_SECONDS)  # for it to be asked again
        assert client.status["state"] == status["state"] == "ready"
        (home / f"engine.{fault}").unlink()
        status = client.wait(lambda status: status["problem"] is None, SECONDS)
    assert (status["state"], status["generation"]) == ("ready", 1)
    assert engine.list() == [before]


def test_a_surprise_of_its_library_is_told_and_logged_and_ends_no_agent(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    agent = agent_of(layout)
    surprises = home / "engine.surprises"
    surprises.touch()
    with pytest.raises(EngineFailed, match="AttributeError"):
        ask_agent(layout, AT, "list")
    engine.signal(engine.find(plan_of(run_file)), signal.SIGKILL)  # type: ignore[arg-type]
    status = wait_for(run_file, lambda status: status["problem"] is not None)
    assert "'NoneType' object has no attribute 'items'" in status["problem"]
    assert "Traceback" in layout.agent_log(NAME).read_text()
    surprises.unlink()
    status = wait_for(run_file, lambda status: status["exit"] and not status["problem"])
    assert status["exit"]["signal"] == "SIGKILL"
    assert agent_of(layout) == agent


# Stopping.


def test_a_stop_is_hastened_by_another_with_less_grace(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    run_file = ready(home, image)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("stop", grace_seconds=600.0)
        client.wait(lambda status: status["state"] == "stopping", SECONDS)
        time.sleep(0.5)  # for the engine to be asked
        client.send("stop", grace_seconds=0.0)
        status = client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert status["exit"]["signal"] == "SIGKILL"
    assert engine.list() == []


async def test_however_many_stops_give_a_long_grace_the_engine_is_asked_all_the_same(
    engine: ProcessEngine, home: Path, image: Path
) -> None:
    labels = Labels("home", "sample", "sample-0-1", "1")
    plan = ReplicaPlan(labels=labels, image=str(image), host="127.0.0.1", port=1)
    watch = EngineWatch(engine, lambda _: None, lambda _: None)
    folders = [engine.root / f"openenvd-{number}" for number in range(THREADS + 1)]
    for folder in folders:  # that have not begun to run yet, and so cannot be stopped
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    instances = engine.list()
    stops = [
        asyncio.create_task(watch.call_long(engine.stop, instance, 600.0)) for instance in instances
    ]
    await asyncio.sleep(0.1)
    assert len(await asyncio.wait_for(watch.call(engine.list), SECONDS)) == len(folders)
    for folder in folders:
        shutil.rmtree(folder)
    await asyncio.wait_for(asyncio.gather(*stops), SECONDS)
    watch.close()


def test_a_stop_during_a_start_that_is_refused_is_not_forgotten(
    home: Path, layout: Layout, engine: ProcessEngine
) -> None:
    slow = home / "engine.slow"
    slow.touch()
    started = launch(home, home / "nowhere.py")
    started.release()
    [run_file] = run_files.all_of(layout.runs)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("stop", grace_seconds=0.0)
        client.wait(lambda status: status["state"] == "stopping", SECONDS)
        slow.unlink()
        status = client.wait(lambda status: status["state"] != "stopping", SECONDS)
    assert status["state"] == "stopped"
    started.stop()


def test_nothing_is_left_of_what_was_refused_after_it_was_made(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    image.unlink()  # so that the next agent is refused, which knows of no instance
    status = (read_status_file(run_file.run_dir) or {}) | {"state": "starting", "instance": None}
    (run_file.run_dir / "status.json").write_text(json.dumps(status))
    wait_for(run_file, lambda status: status["state"] == "exited")
    image.write_text(SERVER)  # the engine reads it to describe what it has
    run_files.stop_environment(layout.runs, "sample", 0.0)
    assert engine.list() == []


def test_what_an_engine_that_is_gone_has_keeps_its_folder_and_is_stopped_when_it_is_back(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.5)
    run_file = ready(home, image)
    (home / "engine.gone").touch()
    with pytest.raises(EngineFailed, match=run_file.replica_id):
        run_files.stop_environment(layout.runs, "sample", 0.0)
    assert run_files.read(run_file.run_dir) is not None
    (home / "engine.gone").unlink()
    until(lambda: not engine.list())
    run_files.stop_environment(layout.runs, "sample", 0.0)
    assert list(layout.runs.iterdir()) == []


@pytest.mark.parametrize("fault", ["refuses", "broken"])
def test_nothing_is_left_on_an_engine_that_answered_a_stop_with_an_error(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine, fault: str
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    (home / f"engine.{fault}").touch()
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("stop", grace_seconds=0.0)
        client.wait(lambda status: bool(status["problem"]), SECONDS)
        time.sleep(2 * RETRY_SECONDS)
        assert client.status["state"] == "stopping"
        (home / f"engine.{fault}").unlink()
        client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert engine.list() == []


def test_a_server_that_does_not_answer_is_asked_to_drain_again_and_its_engine_is_not_blamed(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(SERVER.replace("signal.SIGTERM", "signal.SIGUSR1"))
    run_file = ready(home, image)
    ready(home, image)
    [other] = [each for each in run_files.all_of(layout.runs) if each != run_file]
    (home / "engine.silent").touch()
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("drain", timeout_seconds=3600.0)
        status = client.wait(lambda status: bool(status["problem"]), SECONDS)
        assert status["problem"] == "nothing answers at its address"
        assert wait_for(other, lambda status: True)["problem"] is None
        (home / "engine.silent").unlink()
        status = client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert status["exit"]["exit_code"] == 0
    assert "Traceback" not in layout.agent_log(NAME).read_text()


def test_what_its_engine_begins_anew_while_it_drains_is_stopped(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(SERVER.replace("SIGTERM, lambda", "SIGUSR1, lambda *_: None); (lambda"))
    run_file = ready(home, image)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("drain", timeout_seconds=3600.0)
        client.wait(lambda status: status["state"] == "draining", SECONDS)
        engine.tell(engine.list()[0], state="starting", waiting="requeued", runs=1)
        client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert engine.list() == []


def test_a_server_that_does_not_drain_serves_until_the_time_is_over(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)  # SIGUSR1 would end it at once, and its sessions
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("drain", timeout_seconds=3.0)
        client.wait(lambda status: status["state"] == "draining", SECONDS)
        status = client.wait(lambda status: status["state"] != "draining", SECONDS)
        assert status["state"] == "stopping"
        status = client.wait(lambda status: status["state"] == "stopped", SECONDS)
    assert status["exit"]["signal"] is None
    assert engine.list() == []


DAY = 86_400.0
# Of the agent's Python: its `time.time()` is off by what a file says.
STEPPED_CLOCK = """
import time
_now = time.time
time.time = lambda: _now() + float(open({file!r}).read())
"""


@pytest.fixture
def offset(engine: ProcessEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def test_a_clock_that_steps_ahead_ends_no_drain(
    home: Path, layout: Layout, image: Path, offset: Path
) -> None:
    says_so = "SIGUSR1, lambda *_: print('told', flush=True)); (lambda"
    image.write_text(SERVER.replace("SIGTERM, lambda", says_so))
    run_file = ready(home, image)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("drain", timeout_seconds=600.0)
        client.wait(lambda status: status["state"] == "draining", SECONDS)
    log = Path(run_file.log_path)
    until(lambda: "told" in log.read_text())
    kill_agent(layout)
    step_clock(offset, DAY)
    status = wait_for(run_file, lambda status: status["pid"] is not None)
    until(lambda: log.read_text().count("told") == 2 or not is_draining(run_file))
    assert is_draining(run_file), status


def test_a_clock_that_steps_back_delays_no_end_of_a_drain(
    home: Path, image: Path, offset: Path
) -> None:
    run_file = ready(home, image)
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("drain", timeout_seconds=1.0)
        client.wait(lambda status: status["state"] == "draining", SECONDS)
        step_clock(offset, -DAY)
        client.wait(lambda status: status["state"] == "stopped", SECONDS)


def is_draining(run_file: RunFile) -> bool:
    return bool((read_status_file(run_file.run_dir) or {})["state"] == "draining")


@pytest.mark.parametrize(("deadline", "left"), [(110.0, 10.0), (90.0, 0.0), (2.0**30, 0.0)])
def test_a_deadline_of_an_earlier_boot_is_over(deadline: float, left: float) -> None:
    assert ReplicaStatus(deadline=deadline).seconds_left(100.0) == left


# Logs.


def instance_that_prints(engine: ProcessEngine, image: Path, text: str) -> Instance:
    """An instance that has printed this so far."""
    labels = Labels("home", "sample", "sample-0-1", "1")
    plan = ReplicaPlan(labels=labels, image=str(image), host="127.0.0.1", port=1)
    folder = engine.root / plan.name
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    (folder / "log").write_text(text)
    [instance] = engine.list()
    return instance


def pump_of(engine: ProcessEngine, instance: Instance, home: Path) -> LogPump:
    return LogPump(engine, instance, run_dir=home, log_path=str(home / "log"), max_bytes=10**6)


async def test_a_piece_whose_cursor_was_not_written_any_more_is_not_written_twice(
    engine: ProcessEngine, home: Path, image: Path
) -> None:
    instance = instance_that_prints(engine, image, "one\n")
    printed, log = engine.root / instance.id / "log", home / "log"
    first = pump_of(engine, instance, home)
    cursor = home / CURSOR_FILE_NAME
    await asyncio.to_thread(until, lambda: cursor.exists() and '"4"' in cursor.read_text())
    before = cursor.read_text()
    printed.write_text("one\ntwo\n")
    await asyncio.to_thread(until, lambda: cursor.read_text() != before)
    first.stop()
    cursor.write_text(before)  # as it is when the agent is killed between log and cursor
    printed.write_text("one\ntwo\nthree\n")
    second = pump_of(engine, instance, home)
    (engine.root / instance.id / "exit").write_text("0")
    await asyncio.wait_for(second.ended.wait(), SECONDS)
    assert log.read_text() == "one\ntwo\nthree\n"


async def test_a_surprise_of_its_library_ends_no_log(
    engine: ProcessEngine, home: Path, image: Path
) -> None:
    instance = instance_that_prints(engine, image, "one\n")
    (engine.root / instance.id / "exit").write_text("0")
    surprises = home / "engine.surprises"
    surprises.touch()
    pump = pump_of(engine, instance, home)
    await asyncio.sleep(0.1)
    surprises.unlink()
    await asyncio.wait_for(pump.ended.wait(), SECONDS)
    assert (home / "log").read_text() == "one\n"


# The agent is killed.


def test_an_exit_that_no_agent_saw_is_explained_by_the_next_one(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    engine.signal(engine.list()[0], signal.SIGKILL)
    status = wait_for(run_file, lambda status: status["state"] == "exited")
    assert status["exit"]["signal"] == "SIGKILL"


def test_a_launch_goes_on_when_the_agent_is_killed_while_it_waits(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(
        "import os, time\nwhile not os.path.exists('../go'): time.sleep(0.02)\n" + SERVER
    )
    started = launch(home, image)
    until(lambda: engine.list() and engine.list()[0].pid)
    kill_agent(layout)
    (home / "engine" / "go").touch()
    [replica] = started.wait_until_ready(SECONDS, lambda _: None)
    started.release()
    assert [instance.pid for instance in engine.list()] == [replica.pid]


def test_a_replica_that_was_written_down_and_not_started_is_started_by_the_next_agent(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    status = read_status_file(run_file.run_dir)
    assert status is not None
    engine.remove(engine.list()[0])
    status |= {"state": "starting", "instance": None, "pid": None}
    (run_file.run_dir / "status.json").write_text(json.dumps(status))
    wait_for(run_file, lambda status: status["state"] == "ready")
    assert len(engine.list()) == 1


def test_a_stop_goes_on_when_the_agent_is_killed_on_the_way(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN"))
    run_file = ready(home, image)
    stopping = threading.Thread(
        target=run_files.stop_environment, args=(layout.runs, "sample", 3.0)
    )
    stopping.start()
    until(lambda: (read_status_file(run_file.run_dir) or {}).get("state") == "stopping")
    kill_agent(layout)
    stopping.join(SECONDS)
    assert not stopping.is_alive()
    assert engine.list() == []
    assert list(layout.runs.iterdir()) == []


def test_what_was_removed_and_not_yet_reported_is_stopped(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    engine.remove(engine.list()[0])
    status = {**(read_status_file(run_file.run_dir) or {}), "state": "stopping"}
    (run_file.run_dir / "status.json").write_text(json.dumps(status))
    run_files.stop_environment(layout.runs, "sample")
    assert list(layout.runs.iterdir()) == []


def test_a_log_is_neither_cut_nor_repeated_when_the_agent_is_killed(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    image.write_text(
        "import threading, time\n"
        "def count():\n"
        "    for number in range(400):\n"
        "        print('line', number, flush=True)\n"
        "        time.sleep(0.005)\n"
        "threading.Thread(target=count, daemon=True).start()\n" + SERVER
    )
    run_file = ready(home, image)
    kill_agent(layout)
    run_files.revive(run_file)
    log = Path(run_file.log_path)
    until(lambda: "line 399\n" in log.read_text())
    lines = [line for line in log.read_text().splitlines() if line.startswith("line")]
    assert lines == [f"line {number}" for number in range(400)]


def test_cleaning_up_after_a_shim_leaves_an_engines_replica_and_its_agent_alone(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    agent = agent_of(layout)
    (run_file.run_dir / "replica.json").unlink()  # as for a folder whose run file was lost
    assert clean_up_after_shim(run_file.run_dir) == []
    assert agent.is_running()
    assert ask(run_file.address, "/health", 5.0)


def test_a_run_file_that_nobody_can_use_keeps_no_other_replica_from_being_served(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    other = layout.run_dir("other-0-1")
    other.mkdir()
    data = {**run_file.data, "environment": "other", "replica_id": other.name, "plan": {}}
    (other / "replica.json").write_text(json.dumps(data))
    assert wait_for(run_file, lambda status: status["state"] == "ready")


# The agent itself.


def test_a_replica_that_is_asked_for_twice_at_once_is_served_once(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    run_file.run_dir.rename(home / "aside")
    with ensure_agent(layout, AT) as first, ensure_agent(layout, AT) as second:
        for client in (first, second):
            client.ask("list")  # so that both are connected
        agent = agent_of(layout)
        agent.suspend()
        (home / "aside").rename(run_file.run_dir)
        fields = {"run_dir": str(run_file.run_dir)}
        asked = [
            threading.Thread(target=client.ask, args=("adopt",), kwargs=fields)
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


def test_variables_are_in_the_run_file_alone(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    """Not in what is told of a replica, in a log, or on a command line, which others may see."""
    run_file = ready(home, image, env={"API_TOKEN": "hush-hush"})
    (home / "engine.surprises").touch()
    with pytest.raises(EngineFailed):
        ask_agent(layout, AT, "list")
    (home / "engine.surprises").unlink()
    told = json.dumps([wait_for(run_file, lambda _: True), ask_agent(layout, AT, "list")])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            told += " ".join(process.cmdline())
    files = [path for path in home.rglob("*") if path.is_file() and engine.root not in path.parents]
    having = {path.name for path in files if "hush-hush" in path.read_text(errors="replace")}
    assert having == {"replica.json"}
    assert "hush-hush" not in told
    assert "AttributeError" in layout.agent_log(AT.key).read_text()


def test_agents_that_are_started_at_the_same_time_are_one(
    home: Path, layout: Layout, engine: ProcessEngine
) -> None:
    threads = [threading.Thread(target=ask_agent, args=(layout, AT, "list")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    agent_of(layout)  # of which there is one


def test_an_agent_whose_socket_is_gone_makes_way_for_the_next(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    first = agent_of(layout)
    layout.agent_socket(NAME).unlink()
    wait_for(run_file, lambda status: status["agent"]["pid"] != first.pid)
    first.wait(SECONDS)


def test_an_agent_tells_what_its_engine_has_or_why_it_cannot(
    home: Path, layout: Layout, engine: ProcessEngine
) -> None:
    assert ask_agent(layout, AT, "list")["instances"] == []
    (home / "engine.gone").touch()
    with pytest.raises(EngineFailed, match="does not answer") as raised:
        ask_agent(layout, AT, "list")
    assert raised.value.hint == "start it"


async def test_an_agent_without_replicas_ends(
    home: Path, layout: Layout, engine: ProcessEngine
) -> None:
    make_private(layout.sockets)
    make_private(layout.engines)
    make_private(layout.engines / NAME)
    path = layout.agent_socket(NAME)
    control = open_control_socket(str(path))
    await asyncio.wait_for(Agent(layout, AT, engine, control, idle_seconds=0.0).run(), SECONDS)
    assert not path.exists()
    engine.close()
    for thread in threading.enumerate():
        if thread.name == "changes":  # which asks the engine, and so makes its folder
            await asyncio.to_thread(thread.join, SECONDS)
            assert not thread.is_alive()


# Strays.


def start_stray(home: Path, image: Path, engine: ProcessEngine) -> Instance:
    """An instance of this home that nobody has written down."""
    run_file = ready(home, image)
    plan = ReplicaPlan.from_json(run_file.data["plan"])
    labels = replace(plan.labels, replica="gone-0-1", environment="gone")
    return engine.start(replace(plan, labels=labels, port=plan.port + 1000))


def test_what_nobody_has_written_down_is_shown_and_stopped_when_asked_alone(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    stray = start_stray(home, image, engine)
    path = layout.engines / NAME / STRAYS_FILE_NAME
    shown = until(lambda: path.exists() and json.loads(path.read_bytes())["strays"])
    assert [each["id"] for each in shown] == [stray.id]
    found = ask_agent(layout, AT, "list")["instances"]
    assert {each["environment"]: each["is_stray"] for each in found} == {
        "sample": False,
        "gone": True,
    }
    ask_agent(layout, AT, "stop", instance=stray.id)
    assert [each.labels.environment for each in engine.list()] == ["sample"]
    until(lambda: json.loads(path.read_bytes())["strays"] == [])


def test_strays_are_listed_and_stopped_by_who_they_are(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    start_stray(home, image, engine)
    [seen] = until(lambda: strays_seen(layout))
    assert (seen["provider"], seen["replica"]) == (NAME, "gone-0-1")
    for _ in range(2):  # once more is fine
        stop_stray(layout, seen, 1.0)
    assert [each.labels.environment for each in engine.list()] == ["sample"]


def test_agents_look_for_strays_when_asked_and_say_why_they_cannot(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    start_stray(home, image, engine)
    kill_agent(layout)
    (layout.engines / NAME / STRAYS_FILE_NAME).unlink(missing_ok=True)
    assert list(look_again(layout)) == []
    assert [each["replica"] for each in strays_seen(layout)] == ["gone-0-1"]
    (home / "engine.gone").touch()
    [(name, why)] = look_again(layout)
    assert name == NAME
    assert "does not answer" in why


def test_a_stray_of_an_engine_that_was_never_used_starts_no_agent(
    home: Path, layout: Layout
) -> None:
    with pytest.raises(EngineFailed, match="used no engine"):
        stop_stray(layout, {"provider": "elsewhere", "id": "x"}, 1.0)
    assert not layout.engines.exists()


def test_what_is_written_down_is_not_stopped_as_a_stray(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    ready(home, image)
    [instance] = engine.list()
    with pytest.raises(EngineFailed, match="no stray"):
        ask_agent(layout, AT, "stop", instance=instance.id)
    assert engine.list() == [instance]


def test_a_run_folder_that_is_removed_makes_a_stray_and_stops_nothing(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    run_file.run_dir.rename(home / "moved")
    path = layout.engines / NAME / STRAYS_FILE_NAME
    shown = until(lambda: path.exists() and json.loads(path.read_bytes())["strays"])
    assert [each["replica"] for each in shown] == [run_file.replica_id]
    assert ask(run_file.address, "/health", 5.0)


# Addresses.


@pytest.mark.parametrize(
    ("told", "found"),
    [("http://127.0.0.2:{port}", "127.0.0.2"), ("http://127.0.0.3:1", "127.0.0.1")],
)
def test_a_replica_is_reached_where_it_answers_and_the_next_agent_knows(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine, told: str, found: str
) -> None:
    image.write_text(SERVER.replace('("127.0.0.1", int', '("", int'))
    (home / "engine.address").write_text(told)
    run_file = ready(home, image)
    assert run_files.endpoint_of(run_file) == (found, run_file.port)
    kill_agent(layout)
    status = wait_for(run_file, lambda status: status["state"] == "ready")
    assert (status["host"], status["port"]) == (found, run_file.port)


# Scaling.

AT_GATEWAY: dict[str, Any] = {"address": "http://127.0.0.1:1/envs/sample", "gateway": True}


def add(home: Path, like: RunFile, shares: list[int | None]) -> list[RunFile]:
    """Replicas that a request adds, which are ready."""
    added = provider_named(NAME, home).add(
        like, shares, replicas=1 + len(shares), added_by="change", on_started=lambda _: None
    )
    ready = added.wait_until_ready(SECONDS, lambda _: None)
    added.release()
    found = [run_files.read(Path(str(replica.run_dir))) for replica in ready]
    return [run_file for run_file in found if run_file is not None]


def test_replicas_are_added_behind_the_gateway(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    first = ready(home, image, max_sessions=6, **AT_GATEWAY)
    added = add(home, first, [2, 2])
    everyone = [first, *added]
    assert {each.address for each in everyone} == {first.address}
    assert len({each.port for each in everyone}) == 3
    assert [(each.ordinal, each.number) for each in everyone] == [(0, 0), (1, 1), (2, 2)]
    assert [each.max_sessions for each in added] == [2, 2]
    assert {each.data[run_files.ADDED_BY] for each in added} == {"change"}
    assert {each.labels.replica for each in engine.list()} == {e.replica_id for e in everyone}
    for run_file in added:
        assert ask(f"http://127.0.0.1:{run_file.port}", "/health", 5.0)
        plan = ReplicaPlan.from_json(run_file.data["plan"])
        options = json.loads(plan.env[HOST_OPTIONS_VARIABLE])
        assert options["headers"][REPLICA_HEADER] == run_file.replica_id
        assert (options["replica"], options["max_sessions"]) == (run_file.number, 2)


def test_a_replica_at_its_own_port_gets_no_others_and_the_remedy_is_told(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    first = ready(home, image)
    with pytest.raises(InvalidSpec, match="only behind the gateway") as raised:
        add(home, first, [None])
    remedy = f"openenv launch {image} --name sample --provider {NAME} --gateway --replicas 2"
    assert str(raised.value.hint).startswith(remedy)
    assert len(engine.list()) == 1


def test_an_update_of_an_engines_environment_has_other_numbers(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    first = ready(home, image, **AT_GATEWAY)
    update = launch(home, image, replicas=2, **AT_GATEWAY)
    update.wait_until_ready(SECONDS, lambda _: None)
    update.release()
    numbers = [each.number for each in run_files.of_environment(layout.runs, "sample")]
    assert sorted(numbers) == [first.number, 1, 2]


def test_a_drain_outlives_the_agent(
    home: Path, layout: Layout, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image)
    kill_agent(layout)
    scaling.drain(run_file, SECONDS)
    [instance] = engine.list()
    waiting = threading.Thread(target=scaling.wait_until_gone, args=([run_file], SECONDS))
    waiting.start()
    kill_agent(layout)
    waiting.join(1.0)
    assert waiting.is_alive()  # as is the replica
    engine.signal(instance, signal.SIGTERM)
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    assert engine.list() == []


def test_another_share_of_the_sessions_holds_from_the_next_start_on(
    home: Path, image: Path, engine: ProcessEngine
) -> None:
    run_file = ready(home, image, max_sessions=6)
    scaling.share_out([run_file], [4], 1)
    engine.signal(engine.list()[0], signal.SIGKILL)
    wait_for(run_file, lambda status: status["state"] == "exited")
    with ShimClient.connect(run_file.socket_path) as client:
        client.send("start")
        client.wait(lambda status: status["state"] == "ready", SECONDS)
    plan = json.loads((engine.root / engine.list()[0].id / "plan.json").read_text())
    assert json.loads(plan["env"][HOST_OPTIONS_VARIABLE])["max_sessions"] == 4
