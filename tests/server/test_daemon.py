# SPDX-License-Identifier: Apache-2.0
"""A daemon that cannot start reports the reason in one line through the ready pipe; stopping."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.client import daemon, following
from openenvd.environments.agent_client import ADDRESS_FILE_NAME, EngineAddress
from openenvd.environments.shim.files import write_json
from openenvd.schema.settings import FIRST_PORT, PORTS, Paths, Settings
from openenvd.server.daemon import VITAL_THREADS, Daemon
from openenvd.server.dispatch.memory_estimates import PROCESSES_OF_DAEMON, check_process_room
from openenvd.server.listening import bind, hold_lock, identity_of
from openenvd.system.memory.limits import ProcessRoom

from .conftest import WAIT_SECONDS

Json = dict[str, Any]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


# Enters a control group first.
WITHIN = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']


def refusal_of(home: Path, *flags: str, group: Path | None = None, **variables: str) -> Json:
    """What a daemon that cannot start says; in a control group, where one is named."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "openenvd.server", "--port=0", f"--ready-fd={writing}", *flags]
    command = command if group is None else [*WITHIN, str(group), *command]
    environ = {**os.environ, "OPENENV_HOME": str(home), **variables}
    done = subprocess.run(
        command, env=environ, pass_fds=[writing], timeout=WAIT_SECONDS, capture_output=True
    )
    os.close(writing)
    with open(reading) as pipe:
        [line] = pipe.read().splitlines()
    answer: Json = json.loads(line)
    assert (done.returncode, answer["ready"]) == (1, False)
    assert b"Traceback" not in done.stderr
    error: Json = answer["error"]
    return error


def test_a_port_in_use_is_reported_with_the_process_that_listens_and_never_replaced(
    home: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refusal_of(home, f"--port={port}")
    assert error["kind"] == "port_in_use"
    assert f"port {port}" in error["message"]
    assert f"pid {os.getpid()}" in error["message"]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it already
            stack.enter_context(socket.create_server(("127.0.0.1", FIRST_PORT)))
        assert refusal_of(home, f"--port={FIRST_PORT}")["kind"] == "port_in_use"


def test_a_daemon_that_no_port_was_asked_of_takes_the_next_free_one(home: Path) -> None:
    paths = Paths(home)
    paths.sockets.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it already
            stack.enter_context(socket.create_server(("127.0.0.1", FIRST_PORT)))
        tcp, _ = (stack.enter_context(each) for each in bind(paths, Settings()))
        identity = identity_of(paths, tcp, {})
    assert FIRST_PORT < identity["port"] < FIRST_PORT + PORTS


def test_too_little_memory_is_reported_once_with_a_hint(home: Path) -> None:
    error = refusal_of(home, OPENENV_RESERVE_MB="100000000")
    assert error["kind"] == "too_small"
    assert error["hint"] not in error["message"]


def test_too_little_memory_is_noticed_before_the_large_imports(home: Path) -> None:
    """The kernel ended a daemon in 60 MB while it imported, and nobody could say why."""
    script = (
        "import sys; from openenvd.server.__main__ import main; code = main(['--port=0']);"
        "sys.exit(code if {'fastapi', 'sqlalchemy'}.isdisjoint(sys.modules) else 99)"
    )
    environ = {**os.environ, "OPENENV_HOME": str(home), "OPENENV_RESERVE_MB": "100000000"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, timeout=WAIT_SECONDS, capture_output=True
    )
    assert done.returncode == 1
    assert b"of memory are too few" in done.stderr


# Engines' libraries, what only a command, a worker or an env host needs, and what libraries of the
# daemon's would bring along.
NOT_IN_THE_DAEMON = {
    "click",
    "docker",
    "httpx",
    "kubernetes",
    "msgspec",
    "multiprocessing",
    "numpy",
    "openenv",
    "pyarrow",
    "pydantic.v1",
    "ray",
    "requests",
    "rich",
    "sqlalchemy.orm",
    "tarfile",
    "tomllib",
    "uvicorn.main",
    "websockets",
    "yaml",
    "openenvd.cli",
    "openenvd.client",
    "openenvd.environments.agent.agent",
    "openenvd.environments.engines.docker.engine",
    "openenvd.environments.engines.kubernetes.engine",
    "openenvd.environments.engines.swarm.engine",
    "openenvd.environments.preparation.image_build",
    "openenvd.rollouts.run",
    "openenvd.env_host.shard",
    "openenvd.env_host.sessions",
}


def test_the_daemon_imports_nothing_that_it_does_not_need() -> None:
    """Each of these costs it memory for as long as it runs: it idles in 55 MB."""
    script = (
        "import sys; from openenvd.server.operations.registry import PRELOAD\n"
        "from openenvd.system.process.forking import preload; preload(PRELOAD, collect=False)\n"
        "from openenvd.server.__main__ import _import_daemon; _import_daemon()\n"
        "print(*(name for name, module in sys.modules.items() if module is not None))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True
    )
    assert set(done.stdout.split()) & NOT_IN_THE_DAEMON == set()


def test_a_home_that_is_no_folder_is_reported(home: Path) -> None:
    home.write_text("")
    assert refusal_of(home)["kind"] == "state_unwritable"


def test_a_home_is_made_private_and_one_daemons_that_leaves_no_identity_and_no_socket(
    outside: Paths,
) -> None:
    outside.home.mkdir(parents=True)
    outside.home.chmod(0o755)
    daemon.connect(outside, settings={"port": 0})
    try:
        assert refusal_of(outside.home)["kind"] == "already_running"
        assert daemon.find(outside) is not None
        assert outside.sockets.exists()
    finally:
        daemon.stop(outside)
    assert not outside.daemon_file.exists()
    assert not outside.sockets.exists()
    for path in [outside.home, *outside.home.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_folder_that_others_can_read_and_that_holds_more_is_left_as_it_is(home: Path) -> None:
    home.mkdir()
    home.chmod(0o755)
    (home / "thesis.tex").write_text("")
    error = refusal_of(home)
    assert error["kind"] == "state_exposed"
    assert f"chmod 700 {home}" in error["hint"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o755


@pytest.mark.parametrize("limit", [1, 4, PROCESSES_OF_DAEMON])
def test_too_few_processes_are_reported_with_the_limit(
    home: Path, pids_group: Path, limit: int
) -> None:
    """The daemon itself is one of them."""
    (pids_group / "pids.max").write_text(str(limit))
    error = refusal_of(home, group=pids_group)
    assert error["kind"] == "no_processes"
    sentence = f"{limit - 1} are left: 1 of {limit} processes and threads are in use"
    assert sentence in error["message"]
    assert f"pids.max at /{pids_group.name}" in error["message"]
    assert error["hint"]


@pytest.mark.parametrize("limit", [1, 2, 4, 5])
def test_processes_taken_by_others_during_the_start_are_reported_without_a_traceback(
    home: Path, pids_group: Path, limit: int
) -> None:
    """It had looked, and there was room: whatever it is that then cannot be started, no traceback
    is what is said."""
    script = (
        "import sys\n"
        "from openenvd.system.memory import limits\n"
        "limits.process_room = lambda: None\n"
        "from openenvd.server.__main__ import main\n"
        "sys.exit(main(['--port=0']))"
    )
    (pids_group / "pids.max").write_text(str(limit))
    done = subprocess.run(
        [*WITHIN, str(pids_group), sys.executable, "-c", script],
        env={**os.environ, "OPENENV_HOME": str(home)},
        timeout=WAIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "there is no room for another process" in done.stderr


CLI = ["-c", "import sys; from openenvd.cli.entry import main; sys.exit(main())"]


@pytest.mark.parametrize("program", [[*CLI, "status"], ["-m", "openenvd.server"]])
def test_an_address_is_refused_as_home_by_each_program(tmp_path: Path, program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "OPENENV_HOME": "localhost:8585"}, cwd=tmp_path,
        timeout=WAIT_SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "a home is a folder, not an address: 'localhost:8585'" in done.stderr


def test_a_daemon_is_not_started_where_it_may_open_few_files(home: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", sys.executable, *CLI, "up"],
        env={**os.environ, "OPENENV_HOME": str(home)}, timeout=WAIT_SECONDS,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "the limit of open files is 20" in done.stderr
    assert "permissions" not in done.stderr


def test_without_a_limit_on_processes_there_is_room() -> None:
    check_process_room(None)
    check_process_room(ProcessRoom(100, 100 - PROCESSES_OF_DAEMON, "pids.max at /a"))


@pytest.fixture
def outside(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / ("deep-" * 20) / "home")
    assert not paths.sockets.is_relative_to(paths.home)
    return paths


def test_a_daemon_stops_while_it_waits_for_an_engine_that_does_not_answer(home: Path) -> None:
    paths = Paths(home)
    home.mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as engine:
        address = f"tcp://127.0.0.1:{engine.getsockname()[1]}"
        used = EngineAddress.of("docker", {"DOCKER_HOST": address})
        (paths.engines / used.key).mkdir(parents=True)
        write_json(str(paths.engines / used.key / ADDRESS_FILE_NAME), used.to_json())
        daemon.connect(paths, settings={"port": 0})
        asked, _ = engine.accept()
        daemon.stop(paths)
        asked.close()


def test_a_damaged_database_is_reported_and_no_folder_of_sockets_is_left(outside: Paths) -> None:
    outside.home.mkdir(parents=True)
    outside.database.write_text("no database " * 100)
    error = refusal_of(outside.home)
    assert (error["kind"], bool(error["hint"])) == ("database", True)
    assert "not a SQLite database" in error["message"]
    assert not outside.sockets.exists()


def test_with_its_home_removed_a_daemon_ends_with_its_replicas_and_sockets(outside: Paths) -> None:
    client = daemon.connect(outside, settings={"port": 0})
    launch = following.run(client, "launch", {"source": "echo", "shards": 1})
    [replica] = launch["result"]["environment"]["replicas"]
    server = psutil.Process(replica["pid"])
    shim = psutil.Process(server.ppid())
    shutil.rmtree(outside.home)
    _, alive = psutil.wait_procs([server, shim], timeout=WAIT_SECONDS)
    assert not alive
    wait_gone(client.identity["pid"])
    assert not outside.home.exists()
    assert not outside.sockets.exists()


def test_the_next_daemon_of_any_home_removes_the_sockets_of_a_killed_one(outside: Paths) -> None:
    process = psutil.Process(daemon.connect(outside, settings={"port": 0}).identity["pid"])
    both = [process, *process.children(recursive=True)]  # the workers end by themselves
    process.kill()
    assert not psutil.wait_procs(both, WAIT_SECONDS)[1]
    shutil.rmtree(outside.home)
    assert outside.socket.exists()
    other = Paths(outside.home.with_name("other"))
    daemon.connect(other, settings={"port": 0})
    deadline = time.monotonic() + WAIT_SECONDS
    while outside.sockets.exists():  # which it does beside all else
        assert time.monotonic() < deadline
        time.sleep(0.05)
    daemon.stop(other)


def test_a_database_that_refuses_the_recovery_is_reported(paths: Paths) -> None:
    with sqlite3.connect(paths.database) as connection:
        connection.execute(
            "INSERT INTO requests (id, operation, schedule, payload, state, created_at, started_at,"
            " priority, attempts, max_attempts)"
            " VALUES ('0123456789abcdef', 'launch', 'LONG', '{}', 'RUNNING', 1.0, 1.0, 0, 1, 3)"
        )
        connection.execute(
            "CREATE TRIGGER stubborn BEFORE UPDATE ON requests"
            " BEGIN SELECT RAISE(ABORT, 'not today'); END"
        )
    connection.close()
    error = refusal_of(paths.home)
    assert error["kind"] == "database"
    assert "not today" in error["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc counts wake-ups")
def test_an_idle_daemon_sleeps(home: Path) -> None:
    """At most two wake-ups a second: of all its threads, the zygote and the workers."""
    pid = daemon.connect(Paths(home), settings={"port": 0}).identity["pid"]
    try:
        # The first samples of the loop's lag follow the call that found the daemon up.
        deadline = time.monotonic() + WAIT_SECONDS
        while (count := wake_ups_in(pid, seconds=2.0)) > 4:
            assert time.monotonic() < deadline, f"{count / 2} wake-ups a second"
    finally:
        daemon.stop(Paths(home))


def wake_ups_in(pid: int, seconds: float) -> int:
    before = wake_ups(pid)
    time.sleep(seconds)
    return wake_ups(pid) - before


def wake_ups(pid: int) -> int:
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    lines = [
        line
        for each in pids
        for status in Path(f"/proc/{each}/task").glob("*/status")
        for line in status.read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def wait_gone(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has exited, and been reaped
        psutil.Process(pid).wait(WAIT_SECONDS)


def test_a_daemon_whose_home_is_removed_logs_why_it_stops(home: Path) -> None:
    """In the foreground: otherwise its log has gone as well."""
    command = [sys.executable, "-m", "openenvd.server", "--port=0"]
    environ = {**os.environ, "OPENENV_HOME": str(home)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "answers at" not in process.stderr.readline():
            assert process.poll() is None
        shutil.rmtree(home)
        _, told = process.communicate(timeout=WAIT_SECONDS)
    assert f"the state folder {home} was removed" in told
    assert "Traceback" not in told
    assert process.returncode == 0


UNINSTALLED = """
import runpy, sys
from openenvd.server import daemon
daemon.HOME_SECONDS = 0.01
daemon.installation.is_removed = lambda: True
daemon.write_to_terminals = lambda text: print("terminals:", text.strip(), file=sys.stderr)
runpy.run_module("openenvd.server", run_name="__main__", alter_sys=True)
"""


def test_a_daemon_that_was_uninstalled_says_what_still_runs_and_how_to_end_it(home: Path) -> None:
    command = [sys.executable, "-c", UNINSTALLED, "--port=0"]
    environ = {**os.environ, "OPENENV_HOME": str(home)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("terminals:"):
            assert process.poll() is None
        line += process.stderr.readline()
        shutil.rmtree(home)  # as it says
        process.communicate(timeout=WAIT_SECONDS)
    assert f"daemon (pid {process.pid}), environments: none\n" in line
    assert f": rm -r {home}\n" in line


def test_a_daemon_whose_home_was_moved_leaves_the_next_one_alone(home: Path) -> None:
    paths = Paths(home)
    first = daemon.connect(paths, settings={"port": 0}).identity["pid"]
    home.rename(home.with_name("moved"))
    second = daemon.connect(paths, settings={"port": 0})
    try:
        wait_gone(first)
        assert daemon.read_identity(paths) == second.identity
        assert daemon.find(paths) is not None
    finally:
        daemon.stop(paths)


# A daemon without one of its threads.


def fail() -> None:
    raise ValueError("a defect")


def run_until_it_fails(name: str) -> None:
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored afterwards
    paths = Paths(tmp_path)
    with hold_lock(paths) as lock:
        yield Daemon(paths, Settings(), None, None, lock)


@pytest.mark.parametrize("name", sorted(VITAL_THREADS))
async def test_a_daemon_stops_when_a_vital_thread_dies(
    watched: Daemon, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched.watch_threads()
    run_until_it_fails(name)
    await asyncio.wait_for(watched.stopping.wait(), 10)
    assert f"the thread {name} failed" in caplog.text
    assert "a defect" in caplog.text


async def test_a_daemon_goes_on_without_a_thread_that_is_not_vital(watched: Daemon) -> None:
    watched.watch_threads()
    run_until_it_fails("lag-watchdog")
    await asyncio.sleep(0.05)
    assert not watched.stopping.is_set()


# The daemon's own log as JSON lines, of a real daemon.


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """The log of a daemon that launched `echo`, failed to launch another, and stopped."""
    paths = Paths(tmp_path_factory.mktemp("json") / "home")
    client = daemon.connect(paths, settings={"port": 0, "log_format": "json"})
    following.run(client, "launch", {"source": "echo", "name": "trial", "shards": 1})
    lost = {"source": "json:Lost", "cwd": str(paths.home), "name": "lost"}
    following.wait(lambda: client, client.submit("launch", lost)["id"])
    following.run(client, "down", {"name": "trial"})
    daemon.stop(paths)
    return [json.loads(line) for line in paths.daemon_log.read_text().splitlines()]


def test_each_line_also_of_uvicorn_is_an_object_and_no_error(lines: list[Json]) -> None:
    for line in lines:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert line["level"] in logging.getLevelNamesMapping()
        assert line["logger"]
        assert line["message"]
    assert [line["message"] for line in lines if line["level"] in ("ERROR", "CRITICAL")] == []
    [one] = [line for line in lines if line["message"].startswith("Finished server process")]
    assert one["logger"] == "uvicorn.error"
    assert "color_message" not in one


def test_the_lines_of_a_launch_carry_its_request_and_its_error(lines: list[Json]) -> None:
    of_trial = [line for line in lines if line.get("environment") == "trial"]
    start, end = [line for line in of_trial if line.get("operation") == "launch"]
    assert start["request_id"] == end["request_id"]
    assert len(start["request_id"]) == 16
    assert start["worker"].startswith("long-")
    assert start["pid"] > 0
    assert end["message"].endswith("(launch trial) succeeded")
    assert "READY" in {line.get("state") for line in of_trial if "replica" in line}
    assert "environment trial is STOPPED" in {line["message"] for line in of_trial}
    [failed] = [line for line in lines if "(launch lost) failed" in line["message"]]
    assert failed["environment"] == "lost"
    assert "module json has no class Lost" in failed["message"]


def test_a_traceback_and_a_warning_are_one_line_each(tmp_path: Path) -> None:
    script = (
        "import logging, sys, warnings\n"
        "from openenvd.server.__main__ import set_up_log\n"
        "from openenvd.schema.settings import Paths, Settings\n"
        "set_up_log(Paths.from_environment(), Settings(log_format='json'), in_background=False)\n"
        "try:\n    raise ValueError('a defect')\n"
        "except ValueError:\n    logging.getLogger('x').exception('it failed', extra={'pid': 7})\n"
        "warnings.warn('old')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OPENENV_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    failed, warned = [json.loads(line) for line in done.stderr.splitlines()]
    assert (failed["message"], failed["pid"]) == ("it failed", 7)
    assert "ValueError: a defect" in failed["exc_info"]
    assert warned["logger"] == "py.warnings"
    script = (
        "import sys\n"
        "from openenvd.server.__main__ import set_up_log\n"
        "from openenvd.schema.settings import Paths, Settings\n"
        "set_up_log(Paths.from_environment(), Settings(), in_background=False)\n"
        "sys.exit('pythonjsonlogger' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT_SECONDS).returncode == 0
