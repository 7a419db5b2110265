# SPDX-License-Identifier: Apache-2.0
"""`scale` and `restart` as a worker calls them: real replicas, and sessions that go on."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from openenvd.environments import run_files, scaling
from openenvd.environments.run_files import RUN_FILE_VERSION, RunFile
from openenvd.environments.shim.client import ShimClient
from openenvd.environments.shim.files import RUN_FILE_NAME, STATUS_FILE_NAME, write_json
from openenvd.schema.errors import (
    EnvironmentsError,
    InvalidSpec,
    NotReady,
    NotRunning,
    ReplicaFailed,
)
from openenvd.schema.layout import Layout
from openenvd.server.operations import registry

from .conftest import CHANGE_ID, LAUNCH_ID, Run

WAIT_SECONDS = 60.0
# A class that cannot be imported any more when its switch is there.
SAMPLE = """
import pathlib
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
if pathlib.Path({switch!r}).exists():
    raise ImportError("its data is gone")
class Sample(EchoEnvironment):
    pass
"""


@pytest.fixture
def launch(run: Run) -> Callable[..., str]:
    """Launches echo, or another source; returns its address."""

    def call(source: str = "echo", **options: Any) -> str:
        launched = run("launch", source=source, name="echo", **options)["environment"]
        return str(launched["address"])

    return call


def write_replica(runs: Path, launch_id: str, created_at: float, **data: Any) -> RunFile:
    """The files of a replica of echo, as if it ran."""
    run_dir = runs / f"echo-0-{launch_id}"
    run_dir.mkdir(parents=True)
    known = {"version": RUN_FILE_VERSION, "replica_id": run_dir.name, "environment": "echo"}
    own = {"request_id": launch_id, "ordinal": 0, "number": 0, "created_at": created_at}
    own |= {"socket_path": "", "log_path": "", "host": "127.0.0.1", "port": 0}
    write_json(str(run_dir / RUN_FILE_NAME), known | own | data)
    write_json(str(run_dir / STATUS_FILE_NAME), {"state": "ready"})
    written = run_files.read(run_dir)
    assert written is not None
    return written


def replicas(layout: Layout) -> list[RunFile]:
    return scaling.replicas_of(layout.runs, "echo")


@contextmanager
def session(address: str) -> Iterator[ClientConnection]:
    """A session, reset."""
    with connect(f"{address.replace('http', 'ws')}/ws", open_timeout=WAIT_SECONDS) as connection:
        connection.send('{"type": "reset"}')
        assert json.loads(connection.recv(WAIT_SECONDS))["type"] == "observation"
        yield connection


def steps(connection: ClientConnection) -> bool:
    connection.send('{"type": "step", "data": {"message": "hey"}}')
    kind: str = json.loads(connection.recv(WAIT_SECONDS))["type"]
    return kind == "observation"


def wait_for(run_file: RunFile, predicate: Callable[[Any], bool]) -> dict[str, Any]:
    with ShimClient.connect(run_file.socket_path) as link:
        return dict(link.wait(predicate, WAIT_SECONDS))


def test_replicas_of_an_earlier_generation_are_not_the_environments(layout: Layout) -> None:
    """As an update leaves them for a moment, or one that is under way or has failed begins them."""
    write_replica(layout.runs, "earlier", 1.0)
    serving = write_replica(layout.runs, "serving", 2.0)
    write_replica(layout.runs, "next", 3.0, held=True)
    assert [each.replica_id for each in replicas(layout)] == [serving.replica_id]


def test_a_replica_whose_folder_is_being_removed_is_not_the_environments(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = write_replica(layout.runs, "removed", 1.0)
    shutil.rmtree(removed.run_dir)
    monkeypatch.setattr(run_files, "of_environment", lambda *_: [removed])  # it was read before
    assert replicas(layout) == []


def test_more_replicas_take_sessions_at_the_same_address(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    address = launch()
    [first] = replicas(layout)
    told: list[dict[str, Any]] = []
    result = run("scale", name="echo", replicas=3, progress=told.append)
    assert (result["environment"]["name"], result["replicas"]) == ("echo", 3)
    assert all(replica["memory_bytes"] for replica in result["environment"]["replicas"])
    assert (len(result["started"]), result["draining"]) == (2, [])
    assert [r.ordinal for r in replicas(layout)] == [0, 1, 2]
    assert {r.address for r in replicas(layout)} == {address}
    assert {r.request_id for r in replicas(layout)} == {LAUNCH_ID}  # the environment's own
    assert [e["replica"]["id"] for e in told if "replica" in e] == result["started"]
    waiting = [event for event in told if event.get("phase") == "waiting"]
    assert [(each["done"], each["total"]) for each in waiting] == [(0, 2), (1, 2), (2, 2)]
    assert waiting[1]["message"] == "1 of 2 replicas ready"
    assert not any("added_by" in r.data for r in replicas(layout))
    pid = wait_for(first, lambda s: s["pid"])["pid"]
    os.kill(pid, signal.SIGSTOP)  # the first accepts nothing now
    try:
        with session(address) as client:
            assert steps(client)
    finally:
        os.kill(pid, signal.SIGCONT)


def size_of(status: dict[str, Any]) -> int:
    size: int = (status.get("capacity") or status["info"])["max_sessions"]
    return size


def test_a_share_holds_for_sessions_and_after_a_restart_of_the_server(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    address = launch(max_sessions=4, admission_timeout_seconds=0.0)
    run("scale", name="echo", replicas=2)
    only, youngest = replicas(layout)
    run("scale", name="echo", replicas=1, drain_timeout_seconds=0)
    scaling.wait_until_gone([youngest], WAIT_SECONDS)  # it would refuse sessions until then
    wait_for(only, lambda s: size_of(s) == 4)
    with ExitStack() as stack:
        for _ in range(4):  # more than the two that it had meanwhile
            stack.enter_context(session(address))
    pid = wait_for(only, lambda s: s["pid"])["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(only, lambda s: s["state"] == "exited")
    with ShimClient.connect(only.socket_path) as link:
        link.send("start")
        info = link.wait(lambda s: s["state"] == "ready", WAIT_SECONDS)["info"]
    assert info is not None
    assert info["max_sessions"] == 4


def test_what_cannot_start_leaves_everything_as_it_was(
    run: Run, layout: Layout, launch: Callable[..., str], tmp_path: Path
) -> None:
    switch = tmp_path / "gone"
    (tmp_path / "sample_env.py").write_text(SAMPLE.format(switch=str(switch)))
    address = launch("sample_env:Sample", cwd=str(tmp_path))
    before = [r.replica_id for r in replicas(layout)]
    switch.touch()
    for change in ({"operation": "scale", "replicas": 3}, {"operation": "restart"}):
        with pytest.raises(ReplicaFailed, match="its data is gone"):
            run(name="echo", **change)
        assert [r.replica_id for r in run_files.of_environment(layout.runs, "echo")] == before
    with session(address) as client:
        assert steps(client)


def test_what_is_added_and_not_ready_names_the_launch_that_says_how_long_that_may_take(
    run: Run, launch: Callable[..., str], tmp_path: Path
) -> None:
    switch = tmp_path / "waits"
    waits = SAMPLE.replace("if ", "while ").replace(
        'raise ImportError("its data is gone")', "__import__('time').sleep(0.02)"
    )
    (tmp_path / "sample_env.py").write_text(waits.format(switch=str(switch)))
    launch("sample_env:Sample", cwd=str(tmp_path), ready_timeout_seconds=5.0)
    switch.touch()
    with pytest.raises(NotReady, match="was not ready after 5 s") as told:
        run("scale", name="echo", replicas=2)
    assert str(told.value.hint).startswith("its launch says")


def test_what_a_killed_attempt_started_is_stopped_by_the_next(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    launch()
    run("scale", name="echo", replicas=2)
    first, left = replicas(layout)
    data = {**left.data, "added_by": CHANGE_ID}
    (left.run_dir / RUN_FILE_NAME).write_text(json.dumps(data))
    result = run("scale", name="echo", replicas=2)
    assert len(result["started"]) == 1
    kept, new = replicas(layout)
    assert kept.replica_id == first.replica_id
    assert new.created_at > left.created_at


@pytest.mark.parametrize("operation", ["restart", "down"])
def test_sessions_that_are_left_are_told_with_the_time_that_they_have(
    run: Run, launch: Callable[..., str], operation: str
) -> None:
    address = launch()
    told: list[dict[str, Any]] = []
    with session(address) as client:

        def progress(event: dict[str, Any]) -> None:
            if event.get("phase") == "draining":
                told.append(event)
                client.close()

        run(operation, name="echo", progress=progress)
    assert [event["message"] for event in told] == [
        "draining: 1 of 1 sessions left",
        "draining: 0 of 1 sessions left",
    ]
    assert [(event["done"], event["total"]) for event in told] == [(0, 1), (1, 1)]
    longest = 600.0 if operation == "restart" else 5.0
    assert longest - 2.0 < told[0]["at_most_seconds"] <= longest


def test_a_restart_that_is_killed_says_which_replica_is_to_go(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    """Once it has kept the new one; the daemon goes on from there."""
    launch()
    (old,) = replicas(layout)
    with pytest.raises(KeyboardInterrupt):
        run("restart", name="echo", progress=killed, drain_timeout_seconds=7)
    (_, new) = replicas(layout)
    assert new.data["in_place_of"] == {
        "replica": old.replica_id,
        "request_id": CHANGE_ID,
        "drain_timeout_seconds": 7.0,
    }
    run("restart", name="echo", replica=new.ordinal, request_id=secrets.token_hex(8))
    (_, newer) = replicas(layout)
    assert newer.data["in_place_of"]["replica"] == new.replica_id


@pytest.mark.parametrize("which", [{}, {"together": [0, 1]}, {"replica": 1}], ids=repr)
def test_the_next_attempt_of_a_killed_restart_goes_on_from_what_was_kept(
    run: Run, layout: Layout, launch: Callable[..., str], which: dict[str, Any]
) -> None:
    """As many as before: it drains what was replaced, and replaces nothing a second time."""
    launch(replicas=2)
    before = {each.replica_id for each in replicas(layout)}
    with pytest.raises(KeyboardInterrupt):
        run("restart", name="echo", progress=killed, **which)
    kept = {each.replica_id for each in replicas(layout)} - before
    told: list[dict[str, Any]] = []
    result = run("restart", name="echo", progress=told.append, **which)
    after = {each.replica_id for each in replicas(layout)}
    assert len(after) == 2
    assert after >= kept
    replaced = {each["old"]: each["new"] for each in result["restarted"]}
    assert set(replaced) == before - after
    assert set(replaced.values()) == after - before
    started = {event["replica"]["id"] for event in told if "replica" in event}
    assert started == after - before  # the daemon watches them
    drains = [event["message"] for event in told if event.get("phase") == "draining"]
    assert drains[0] == ("ending 2 replicas" if "together" in which else "ending 1 replica")


def killed(progress: dict[str, Any]) -> None:
    """Once what is new is kept."""
    if "replica" in progress:
        raise KeyboardInterrupt


def test_the_id_of_a_replica_that_has_ended_is_not_given_to_another(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    launch()
    (first,) = replicas(layout)
    run("restart", name="echo")
    run_files.stop_replica(first.run_dir)  # as the daemon does, once it has ended
    run("restart", name="echo", request_id=secrets.token_hex(8))
    new = replicas(layout)[0]
    assert new.ordinal == first.ordinal
    assert new.replica_id != first.replica_id


def test_one_replica_can_be_restarted_by_its_number(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    launch(replicas=2)
    first, _ = replicas(layout)
    run("restart", name="echo", replica=1)
    assert [r.ordinal for r in replicas(layout)] == [0, 2]
    assert replicas(layout)[0].replica_id == first.replica_id
    with pytest.raises(NotRunning, match="echo has no replica 1") as refused:
        run("restart", name="echo", replica=1, request_id=secrets.token_hex(8))
    assert refused.value.hint == "its replicas are 0, 2"


def test_replicas_that_end_together_are_restarted_in_one_go(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    launch(replicas=3)
    kept, *ending = replicas(layout)
    together = [each.ordinal for each in ending]
    result = run("restart", name="echo", together=[*together, 9], drain_timeout_seconds=7)
    assert [each["old"] for each in result["restarted"]] == [each.replica_id for each in ending]
    staying, *new = replicas(layout)
    assert staying.replica_id == kept.replica_id
    replaced = [each.data["in_place_of"]["replica"] for each in new]
    assert replaced == [each.replica_id for each in ending]
    another = run("restart", name="echo", together=[9], request_id=secrets.token_hex(8))
    assert another["restarted"] == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"replicas": 0}, "0 replicas would serve nobody; `openenv down` stops it"),
        ({"replicas": 1001}, "1001 replicas are more than the 1000 of one environment"),
        ({"min_replicas": 5, "max_replicas": 3}, "min_replicas: 5 is more than max_replicas,"),
        ({"replicas": 4, "max_replicas": 3}, "replicas: 4 is more than max_replicas, which is 3"),
        ({"min_replicas": 2}, "min_replicas: it scales itself only with a max_replicas"),
        ({"min_replicas": 0}, "min_replicas: it scales itself only with a max_replicas"),
        ({"idle_timeout_seconds": 1, "replicas": 2}, "idle_timeout_seconds: of several replicas"),
        ({"idle_timeout_seconds": 1, "serve_as_is": True}, "idle_timeout_seconds: whether the"),
        (
            {"idle_timeout_seconds": 1, "min_replicas": 1, "max_replicas": 2},
            "min_replicas: an environment that sleeps has none",
        ),
    ],
)
def test_a_number_or_range_of_replicas_that_makes_no_sense_is_refused(
    options: dict[str, int], told: str
) -> None:
    is_scale = list(options) == ["replicas"]
    name = {"name": "echo"} if is_scale else {"source": "echo"}
    with pytest.raises(ValueError, match=told):
        registry.by_name("scale" if is_scale else "launch").Payload.model_validate(name | options)


def test_what_scales_itself_has_a_share_of_the_most_and_stays_in_its_range(
    run: Run, layout: Layout, launch: Callable[..., str]
) -> None:
    launch(min_replicas=2, max_replicas=4, max_sessions=16)
    assert [r.max_sessions for r in replicas(layout)] == [4, 4]
    run("scale", name="echo", replicas=3, reason="8 of 8 sessions are taken")
    assert [r.max_sessions for r in replicas(layout)] == [4, 4, 4]
    told = "echo scales itself between 2 and 4 replicas, and 1 is not among these"
    with pytest.raises(InvalidSpec, match=told):
        run("scale", name="echo", replicas=1)


def test_what_sleeps_is_said_to_stay_awake_with_several_replicas_and_no_more_than_its_sessions(
    run: Run, layout: Layout, launch: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    launch(idle_timeout_seconds=60.0, max_sessions=2)
    words = "echo does not sleep while it has several replicas"
    run("scale", name="echo", replicas=2)
    assert words in capsys.readouterr().out
    with pytest.raises(InvalidSpec, match="3 replicas cannot share 2 sessions"):
        run("scale", name="echo", replicas=3)
    assert len(replicas(layout)) == 2
    capsys.readouterr()
    run("scale", name="echo", replicas=1)
    assert words not in capsys.readouterr().out


def test_what_does_not_run_cannot_be_changed(run: Run) -> None:
    for change in ({"operation": "scale", "replicas": 2}, {"operation": "restart"}):
        with pytest.raises(EnvironmentsError, match="echo has no replicas"):
            run(name="echo", **change)
