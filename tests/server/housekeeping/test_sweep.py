# SPDX-License-Identifier: Apache-2.0
"""What killed shims and daemons leave behind, or is long unused, and who takes it away."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.client import daemon
from openenvd.environments import run_files
from openenvd.environments.engines.providers import RUN_DIR_VARIABLE
from openenvd.environments.preparation.project_venv import COMPLETE
from openenvd.environments.preparation.venv_cleanup import UNUSED
from openenvd.environments.shim.files import open_control_socket
from openenvd.executor.supervisor.memory import sweep_cgroups
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.transactions import retention
from openenvd.schema.layout import Layout
from openenvd.schema.settings import Paths, Settings
from openenvd.server import housekeeping
from openenvd.server.housekeeping import Sweeper, collect, sweep_regularly
from openenvd.system.memory.cgroups import CgroupManager

from ...env_host.hosts import until
from ...environments.shim.conftest import Replica

WAIT_SECONDS = 30.0
StartStray = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def replica(paths: Paths) -> Iterator[Replica]:
    replica_id = f"echo-0-{os.getpid()}"
    made = Replica(paths.home / "elsewhere", replica_id=replica_id, cgroups=paths.replica_groups)
    made.run_dir = paths.runs / replica_id
    yield made.ready()
    made.close()


@pytest.fixture
def start_stray(paths: Paths) -> Iterator[StartStray]:
    """Starts processes as replicas do; none is left afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(replica_id: str, *before: str, home: Path = paths.home) -> subprocess.Popen[bytes]:
        environ = {**os.environ, RUN_DIR_VARIABLE: str(home / "run" / replica_id)}
        command = [*before, sys.executable, "-c", "print(flush=True); input()"]
        pipe = subprocess.PIPE
        stray = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe)
        started.append(stray)
        assert stray.stdout is not None
        stray.stdout.readline()
        return stray

    yield start
    for stray in started:
        stray.kill()
        stray.communicate()


def has_run_file(paths: Paths, replica_id: str) -> None:
    (paths.runs / replica_id).mkdir()
    (paths.runs / replica_id / "replica.json").write_text("{}")


def test_a_sweep_reads_each_run_file_once(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    read, look_at = list[str](), run_files.look_at

    def note(run_dir: Path, *version: Any) -> object:
        read.append(run_dir.name)
        return look_at(run_dir, *version)

    monkeypatch.setattr(run_files, "look_at", note)
    folders = [f"echo-{ordinal}-1" for ordinal in range(3)]
    for folder in folders:
        has_run_file(paths, folder)
    Sweeper(paths).sweep()
    assert sorted(read) == folders


def test_a_folder_without_a_run_file_is_removed_at_the_second_look(paths: Paths) -> None:
    folder = paths.runs / "echo-0-1"
    folder.mkdir()
    (folder / "shim.lock").touch()
    sweeper = Sweeper(paths)
    assert sweeper.sweep() == []  # it may be about to get one
    assert sweeper.sweep() == [f"{folder}, which has no run file"]
    assert not folder.exists()


def test_a_replica_that_has_an_owner_is_left_alone_also_when_its_run_file_was_lost(
    paths: Paths, replica: Replica
) -> None:
    sweeper = Sweeper(paths)
    assert [sweeper.sweep(), sweeper.sweep()] == [[], []]
    (replica.run_dir / "replica.json").unlink()
    assert [sweeper.sweep(), sweeper.sweep()] == [[], []]
    assert replica.link.status["state"] == "ready"


def test_processes_of_a_replica_that_is_gone_are_killed(
    paths: Paths, tmp_path: Path, start_stray: StartStray
) -> None:
    has_run_file(paths, "echo-0-2")
    gone = start_stray("echo-0-1")
    others = [start_stray("echo-0-2"), start_stray("echo-0-1", home=tmp_path / "another")]
    sweeper = Sweeper(paths)
    sweeper.sweep()
    assert sweeper.sweep() == [f"process {gone.pid} of echo-0-1, which is gone"]
    assert gone.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert [stray.poll() for stray in others] == [None, None]


def test_a_process_of_another_home_at_the_same_path_is_left_alone(
    paths: Paths, tmp_path: Path, start_stray: StartStray
) -> None:
    """As a container has one: with a file system of its own, and seen in /proc."""
    other = tmp_path / "other"
    (other / "run").mkdir(parents=True)
    inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    inside += [str(other), str(paths.home)]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces cannot be made here")
    stray = start_stray("echo-0-1", *inside)
    sweeper = Sweeper(paths)
    assert [sweeper.sweep(), sweeper.sweep()] == [[], []]
    assert stray.poll() is None


def test_what_looks_ownerless_is_left_alone_when_it_has_an_owner_again(
    paths: Paths, start_stray: StartStray
) -> None:
    stray, path = start_stray("echo-0-1"), paths.replica_socket("echo-0-1")
    bind_and_die([path])
    sweeper = Sweeper(paths)
    sweeper.sweep()
    has_run_file(paths, "echo-0-1")
    assert sweeper.sweep() == []
    assert stray.poll() is None
    assert path.exists()


def test_a_cgroup_whose_run_folder_is_gone_is_removed_with_its_processes(paths: Paths) -> None:
    manager = CgroupManager(paths.replica_groups)
    if not manager.available:
        pytest.skip(f"no memory cgroups here: {manager.why_not}")
    group = manager.create("echo-0-1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stray:
        group.add(stray.pid)
        sweeper = Sweeper(paths)
        sweeper.sweep()
        assert stray.poll() is None
        [taken] = sweeper.sweep()
        assert "echo-0-1, whose replica is gone" in taken
        assert stray.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert not group.exists()
    assert manager.remove()


def test_the_cgroups_of_homes_that_have_ended_are_removed_at_the_second_look(
    paths: Paths, tmp_path: Path
) -> None:
    ended, living = (
        CgroupManager(Layout(tmp_path / name).replica_groups) for name in ("ended", "living")
    )
    own = CgroupManager(paths.replica_groups)
    if not own.available:
        pytest.skip(f"no memory cgroups here: {own.why_not}")
    made = ended.create("echo-0-1")
    os.mkdir(f"{made.directory}/session-1")  # as a server makes for its sessions
    entered = living.create("shims")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        entered.add(process.pid)
        sweeper = Sweeper(paths)
        sweeper.sweep_other_homes()
        assert made.exists()  # its home may be about to use it
        assert f"openenvd/{ended.name}" in sweeper.sweep_other_homes()
        assert not Path(ended.directory).exists()
        assert entered.exists()
        assert Path(own.directory).exists()
        process.communicate()
    assert [living.remove(), own.remove()] == [True, True]


def test_sockets_of_launches_that_were_killed_are_removed_at_the_second_look(paths: Paths) -> None:
    """Of a process that bound them, and was killed before it wrote a run file."""
    folder = paths.runs / "echo-0-2"
    folder.mkdir()
    run_file = {"version": 0, "environment": "echo"}  # of another version: it has its doors, too
    (folder / "replica.json").write_text(json.dumps(run_file))
    left = [paths.replica_socket("echo-0-1"), Path(f"{paths.doors('gone')}0.door")]
    kept = [paths.replica_socket("echo-0-2"), Path(f"{paths.doors('echo')}0.door")]
    kept += [paths.socket, paths.agent_socket("docker"), paths.replica_socket("echo-0-3")]
    bind_and_die([*left, *kept[:-1]])
    with open_control_socket(str(kept[-1])):  # somebody listens there
        sweeper = Sweeper(paths)
        assert sweeper.sweep() == []
        assert all(path.exists() for path in left)  # their launch may be about to go on
        assert set(sweeper.sweep()) == {f"socket {path}, whose replica is gone" for path in left}
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def bind_and_die(sockets: list[Path]) -> None:
    program = (
        "import os, signal, sys; from openenvd.environments.shim.files import open_control_socket; "
        "made = [open_control_socket(path) for path in sys.argv[1:]]; "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, *map(str, sockets)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def test_the_cgroups_of_a_daemon_that_waits_to_be_reaped_are_removed() -> None:
    """Where pid 1 reaps late, a killed daemon is a zombie for long."""
    daemon = subprocess.Popen([sys.executable, "-c", ""])
    manager = CgroupManager(f"executor-{daemon.pid}")
    if not manager.available:
        daemon.wait(WAIT_SECONDS)
        pytest.skip(f"no memory cgroups here: {manager.why_not}")
    group = manager.create("long-1")
    os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOWAIT)
    sweep_cgroups()
    assert not group.exists()
    assert not Path(manager.directory).exists()
    daemon.wait(WAIT_SECONDS)


async def test_the_sweep_looks_twice_soon_and_then_seldom_and_logs_what_it_takes(
    paths: Paths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "CONFIRMATION_SECONDS", 0.0)
    folder = paths.runs / "echo-0-1"
    folder.mkdir()
    answers: list[list[str]] = [[], ["executor-5"]]
    looks = 0

    def sweep_worker_cgroups() -> list[str]:
        nonlocal looks
        looks += 1
        return answers.pop(0) if answers else []

    task = asyncio.create_task(sweep_regularly(paths, sweep_worker_cgroups))
    async with asyncio.timeout(WAIT_SECONDS):
        while folder.exists():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # in which it would look again and again
    task.cancel()
    assert looks == 2
    assert [record.message for record in caplog.records] == [
        "taken away: cgroup executor-5, whose daemon has ended",
        f"taken away: {folder}, which has no run file",
    ]


async def test_a_sweep_that_fails_is_logged_and_tried_again(
    paths: Paths, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "CONFIRMATION_SECONDS", 0.0)
    again = threading.Event()
    looks = 0

    def sweep_worker_cgroups() -> list[str]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError("no room")
        again.set()
        return []

    task = asyncio.create_task(sweep_regularly(paths, sweep_worker_cgroups))
    assert await asyncio.to_thread(again.wait, WAIT_SECONDS)
    task.cancel()
    assert caplog.records[0].message == "the sweep failed: no room"


# Virtual environments.

HUNDRED_DAYS = 100 * 86_400.0


@pytest.fixture
def venv(paths: Paths, dispatch: WriteConnection) -> Path:
    """Unused for a hundred days, by a daemon that has run for that long."""
    folder = paths.venvs / "a"
    folder.mkdir(parents=True)
    (folder / COMPLETE).write_text("{}")
    (folder / UNUSED).write_text(json.dumps({"used": "", "since": 0.0}))
    dispatch.write(retention.note_time, HUNDRED_DAYS, HUNDRED_DAYS)
    return folder


def test_a_daemon_that_starts_removes_virtual_environments_unused_for_as_long_as_is_set(
    paths: Paths, venv: Path
) -> None:
    collect(paths, Settings(keep_venv_days=36_500), HUNDRED_DAYS)
    assert venv.exists()
    daemon.connect(paths, settings={"port": 0})
    until(lambda: not venv.exists())
    daemon.stop(paths)


def test_an_unreadable_folder_does_not_keep_a_daemon_from_starting(paths: Paths) -> None:
    paths.venvs.write_text("no folder")
    daemon.connect(paths, settings={"port": 0})
    daemon.stop(paths)
