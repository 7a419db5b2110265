# SPDX-License-Identifier: Apache-2.0
"""Replicas on this machine: real shims, the real env host, found again by their run files."""

import contextlib
import json
import os
import secrets
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.sync.client import connect

from openenvd.environments import run_files
from openenvd.environments.access import ask, base_url_by_name
from openenvd.environments.engines.local import ports
from openenvd.environments.engines.local import provider as local
from openenvd.environments.engines.local.provider import LocalProvider, check_process_room
from openenvd.environments.engines.started_replicas import readable
from openenvd.environments.shim.client import ShimClient, read_status_file
from openenvd.environments.sources.program import program_of
from openenvd.environments.sources.resolve import resolve
from openenvd.schema.errors import NoProcesses, PortInUse
from openenvd.schema.layout import Layout
from openenvd.schema.spec import EnvironmentSpec
from openenvd.system.memory.limits import ProcessRoom, read_limits

from ..conftest import Started

TIMEOUT_SECONDS = 60.0
CROWD = 48
LAUNCH_ID = secrets.token_hex(8)  # names cgroups, which all tests share


def start(
    home: Path,
    source: str = "echo",
    *,
    cwd: Path = Path("/"),
    launch_id: str = LAUNCH_ID,
    replaces: str | None = None,
    **fields: object,
) -> Started:
    spec = EnvironmentSpec("sample", source, **fields)  # type: ignore[arg-type]
    program = program_of(spec, resolve(source, cwd), None)
    provider = LocalProvider("local", home)
    return Started(provider.start(spec, program, launch_id=launch_id, replaces=replaces))


def test_no_session_is_refused_while_another_replica_has_room(home: Path, layout: Layout) -> None:
    """Crowds that fill all replicas in one instant."""
    replicas = start(home, replicas=3, max_sessions=CROWD)
    url = replicas.address.replace("http", "ws") + "/ws"

    def begin(_: int) -> str:
        client = clients.enter_context(connect(url, open_timeout=TIMEOUT_SECONDS))
        client.send('{"type":"reset","data":{}}')
        answer: str = json.loads(client.recv(TIMEOUT_SECONDS))["type"]
        return answer

    try:
        replicas.wait()
        for _ in range(20):
            with contextlib.ExitStack() as clients, ThreadPoolExecutor(CROWD) as threads:
                assert list(threads.map(begin, range(CROWD))) == ["observation"] * CROWD
            for run_file in run_files.all_of(layout.runs):  # until the last session has ended
                with ShimClient.connect(run_file.socket_path) as link:
                    link.wait(lambda status: status["sessions"] == 0, TIMEOUT_SECONDS)
    finally:
        replicas.stop()


def test_an_update_may_move_its_environment(home: Path) -> None:
    old = start(home)
    old.wait()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    new = start(home, launch_id=secrets.token_hex(8), replaces=LAUNCH_ID, port=port)
    try:
        new.wait()
        assert new.address == f"http://127.0.0.1:{port}"
    finally:
        new.stop()
        old.stop()


def test_another_replica_runs_from_this_installation_where_that_of_the_first_was_removed(
    home: Path, layout: Layout
) -> None:
    started = start(home)
    try:
        started.wait()
        [like] = run_files.all_of(layout.runs)
        python, *options, host = like.data["argv"]
        package = str(Path(host).parents[1])
        gone: Any = like.data | {
            "argv": ["/gone/bin/python", *options, host.replace(package, "/gone/openenvd")],
            "cwd": str(like.data["cwd"]).replace(package, "/gone/openenvd"),
        }
        made = LocalProvider("local", home)._adapt(gone, like.run_dir)
        assert (made["argv"], made["cwd"]) == ([python, *options, host], like.data["cwd"])
    finally:
        started.stop()


def test_more_processes_than_are_left_are_refused_before_anything_starts() -> None:
    spec = EnvironmentSpec("sample", "echo", replicas=2, shards=3)
    check_process_room(spec, ProcessRoom(64, 47, "cgroup v2 pids.max at /a"))
    with pytest.raises(NoProcesses) as refused:
        check_process_room(spec, ProcessRoom(64, 48, "cgroup v2 pids.max at /a"))
    assert refused.value.message == (
        "2 replicas would need about 17 processes and threads, and 16 are left: "
        "48 of 64 processes and threads are in use (cgroup v2 pids.max at /a)"
    )


def start_and_wait(home: Path) -> None:
    started = start(home, shards=4)
    try:
        started.wait()
    finally:
        started.stop()


@pytest.mark.parametrize("left", range(3))
def test_a_process_that_is_refused_on_the_way_names_the_limit(
    home: Path,
    layout: Layout,
    pids_group: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
) -> None:
    """Others took what there was when we looked: a shell's, a shim's, the first shard's."""
    monkeypatch.setattr(local, "check_process_room", lambda *_: None)
    (pids_group / "cgroup.procs").write_text(str(os.getpid()))
    used = int((pids_group / "pids.current").read_text())
    (pids_group / "pids.max").write_text(str(used + left))
    with pytest.raises(NoProcesses, match=f"pids.max at /{pids_group.name}"):
        start_and_wait(home)
    (pids_group / "pids.max").write_text("max")
    assert run_files.all_of(layout.runs) == []


def test_the_host_configuration_has_the_replicas_cores(home: Path, layout: Layout) -> None:
    """It knows no cgroups: it would make more shards than it has processors."""
    replicas = start(home)
    try:
        [run_file] = run_files.all_of(layout.runs)
        config = json.loads(run_file.data["env"]["OPENENVD_HOST_CONFIG"])
        assert config["cores"] == max(1, int(read_limits().cpus))
        assert config["memory_bytes"] is None  # a watchdog would take it for a limit
    finally:
        replicas.stop()


def test_stopping_gives_the_port_back_and_may_be_done_twice(home: Path, layout: Layout) -> None:
    replicas = start(home)
    port = int(replicas.address.rpartition(":")[2])
    replicas.wait()
    replicas.stop()
    replicas.stop()
    again = start(home, port=port)
    again.stop()
    assert list(layout.runs.iterdir()) == []


def test_a_traceback_names_the_project_and_not_our_links(tmp_path: Path) -> None:
    (tmp_path / "my_env").symlink_to("/projects/mine")
    lines = [
        '  File "<frozen importlib._bootstrap>", line 1204, in _gcd_import',
        f'  File "{tmp_path}/my_env/server/app.py", line 3, in <module>',
        '  File "/opt/openenvd/env_host/environment/definition.py", line 211 in _import_class',
        '  File "/opt/openenvd/server/__main__.py", line 182 in <module>',
    ]
    told = ['  File "/projects/mine/server/app.py", line 3, in <module>']
    assert readable(lines, tmp_path) == told
    assert readable(told, tmp_path / "no links") == told


def test_a_replaced_shim_shares_its_siblings_socket(home: Path, layout: Layout) -> None:
    replicas = start(home, replicas=2)
    replicas.wait()
    assert base_url_by_name(layout.runs, "sample") == replicas.address
    first, second = run_files.all_of(layout.runs)
    kill_shim(first)
    run_files.revive(first)
    with ShimClient.connect(first.socket_path) as link:
        status = link.wait(lambda s: s["state"] in ("ready", "exited"), TIMEOUT_SECONDS)
    assert status["state"] == "ready"
    assert status["port"] == second.port
    run_files.stop_environment(layout.runs, "sample")


def test_the_port_of_a_killed_shim_is_kept_for_its_environment_across_homes(
    home: Path, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run_file = ready(home, layout, port=port)
    kill_shim(run_file)
    with pytest.raises(PortInUse, match=f"is reserved for sample of {home}"):
        start(tmp_path, port=port)
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "LAST_PORT", port)
    with pytest.raises(PortInUse, match="all ports"):  # nor when it looks for a free one
        start(tmp_path)
    run_files.revive(run_file)
    with ShimClient.connect(run_file.socket_path) as link:
        link.wait(lambda status: status["state"] == "ready", TIMEOUT_SECONDS)
    assert ask(run_file.address, "/health", 10.0) == {"status": "healthy"}
    run_files.stop_replicas([run_file.run_dir])
    start(tmp_path, port=port).stop()


def ready(home: Path, layout: Layout, source: str = "echo", **fields: Any) -> run_files.RunFile:
    replicas = start(home, source, **fields)
    replicas.wait()
    [run_file] = run_files.all_of(layout.runs)
    return run_file


def kill_shim(run_file: run_files.RunFile) -> None:
    """SIGKILL; returns when it and its server are gone."""
    status: Any = read_status_file(run_file.run_dir)
    pidfds = [os.pidfd_open(pid) for pid in (status["shim"]["pid"], status["pid"])]
    psutil.Process(status["shim"]["pid"]).kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], TIMEOUT_SECONDS)[0]
        os.close(pidfd)
