# SPDX-License-Identifier: Apache-2.0
"""The fork server's life, and what it forks. That forked shims do all that shims do is tested in
`test_shim.py`, which runs for both kinds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.environments.shim import client
from openenvd.environments.shim.client import (
    may_fork,
    start_environment,
    stop_fork_servers,
)
from openenvd.environments.shim.fork_server import is_idle
from openenvd.system.net.listening_sockets import open_listening_sockets
from openenvd.system.process.descriptors import close_all
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.process.tree import wait_until_dead

from .conftest import ON_LINUX, WAIT_SECONDS, Replica, forked

pytestmark = ON_LINUX
Make = Callable[..., Replica]

LOOKS_ROUND = """
import json, os, random, signal, sys, time
HELD = b"x" * (24 << 20)
def main():
    def default(n):
        return signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)
    private = sum(
        int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if "Private_" in line
    )
    paths = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    found = {
        "cwd": os.getcwd(),
        "fds": {fd: os.readlink(path) for fd, path in paths.items() if os.path.lexists(path)},
        "signals": [int(n) for n in (1, 2, 3, 15, 17) if not default(n)],
        "mask": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "random": random.random(),
        "private_kb": private,
    }
    line = json.dumps({"ready": True, "max_sessions": 4, **found}).encode() + b"\\n"
    os.write(int(os.environ["OPENENVD_NOTIFY_FD"]), line)
    time.sleep(3600)
"""


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Iterator[Make]:
    made: list[Replica] = []

    def new(**changes: Any) -> Replica:
        made.append(Replica(tmp_path / str(len(made)), **forked(folder) | changes))
        return made[-1]

    yield new
    for each in made:
        each.close()


def _fork_server_of(replica: Replica) -> psutil.Process:
    """The parent of its shim, once it has given itself its title."""
    parent = psutil.Process(replica.link.status["shim"]["pid"]).parent()
    assert parent is not None
    deadline = time.monotonic() + WAIT_SECONDS
    while parent.cmdline()[0] != "openenvd: fork server":
        assert time.monotonic() < deadline, parent.cmdline()
        time.sleep(0.01)
    return parent


def _await_end(process: psutil.Process) -> None:
    with_start = ProcessIdentity.of(process.pid) if process.is_running() else None
    assert with_start is None or wait_until_dead([with_start], WAIT_SECONDS)


def test_shim_and_server_have_names_sessions_and_descriptors_of_their_own(
    make: Make, folder: Path
) -> None:
    folder.mkdir()
    (folder / "looks_round.py").write_text(LOOKS_ROUND)
    changes: dict[str, Any] = {"entry": "looks_round:main"}
    one, two = make(**changes).ready(), make(**changes).ready()
    found, other = one.status["info"], two.status["info"]
    shim, server = one.status["shim"]["pid"], one.status["pid"]
    name = one.run_file["replica_id"]
    assert psutil.Process(shim).cmdline()[0] == f"openenvd: shim {name}"
    assert psutil.Process(server).cmdline()[0] == f"openenvd: host {name}"
    assert os.getsid(shim) == shim
    assert os.getsid(server) == server
    assert found["cwd"] == one.run_file["cwd"]
    assert (found["signals"], found["mask"]) == ([], [])
    assert found["random"] != other["random"]
    standard = {fd: path for fd, path in found["fds"].items() if int(fd) < 3}
    log = one.run_file["log_path"]
    assert standard == {"0": "/dev/null", "1": log, "2": log}
    rest = sorted(path.partition(":")[0] for fd, path in found["fds"].items() if int(fd) > 2)
    assert rest[0] == "pipe"  # the notify pipe; then the listening sockets
    assert set(rest[1:]) == {"socket"}
    assert len(rest) - 1 == len(one.link.request_listeners())


def test_a_forked_server_owns_only_what_it_writes(make: Make, folder: Path) -> None:
    folder.mkdir()
    (folder / "looks_round.py").write_text(LOOKS_ROUND)
    way = forked(folder)
    fork_server = way["fork_server"] | {"preload": ["looks_round"]}
    one = make(entry="looks_round:main", fork_server=fork_server).ready()
    assert one.status["info"]["private_kb"] < 12 << 10  # of the 24 MB that it can read


def test_many_at_once_share_one_fork_server(make: Make, folder: Path) -> None:
    replicas = [make() for _ in range(12)]
    threads = [threading.Thread(target=replica.start) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for replica in replicas:
        replica.wait_state("ready")
    assert len({_fork_server_of(replica).pid for replica in replicas}) == 1


def test_a_killed_fork_server_is_replaced_and_its_shims_go_on(make: Make) -> None:
    one = make().ready()
    fork_server = _fork_server_of(one)
    fork_server.kill()
    _await_end(fork_server)
    two = make().ready()
    assert _fork_server_of(two).pid != fork_server.pid
    one.tell("sessions 3")
    assert one.wait(lambda s: s["sessions"] == 3)["state"] == "ready"


def test_one_that_hangs_is_done_without_and_replaced(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server = _fork_server_of(make().ready())
    fork_server.suspend()
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(client, "FORK_SECONDS", 0.2)
            make().ready()  # as a program
        assert _fork_server_of(make().ready()).pid != fork_server.pid
    finally:
        fork_server.resume()
        fork_server.terminate()
        _await_end(fork_server)


def test_a_stopped_fork_server_leaves_its_shims_running(make: Make, folder: Path) -> None:
    one = make().ready()
    fork_server = _fork_server_of(one)
    stop_fork_servers()
    _await_end(fork_server)
    one.tell("exit 0")
    one.wait_state("exited")
    one.link.send("start")  # the shim has all that a server needs
    one.wait_state("ready", generation=2)


@pytest.mark.parametrize(
    ("shims", "silent_seconds", "idle"), [(0, 15.0, True), (0, 14.9, False), (1, 99.0, False)]
)
def test_a_fork_server_is_idle_without_shims_and_requests(
    shims: int, silent_seconds: float, idle: bool
) -> None:
    assert is_idle(shims, silent_seconds, idle_seconds=15.0) == idle


def test_an_idle_one_ends_by_itself(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It must not be over before the first request has come, on a busy machine.
    monkeypatch.setattr(client, "IDLE_SECONDS", 2.0)
    one = make().ready()
    fork_server = _fork_server_of(one)
    one.link.send("stop", grace_seconds=0.0)
    one.wait_for_end()
    _await_end(fork_server)


THREADED = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)


@pytest.mark.parametrize(
    "changes",
    [{"log_path": "server_program.py/no_folder"}, {"preload": ["threaded"]}],
    ids=["it cannot start", "a module leaves a thread"],
)
def test_a_fork_server_that_cannot_be_used_makes_way_for_a_program(
    make: Make, folder: Path, changes: dict[str, Any]
) -> None:
    folder.mkdir()
    (folder / "threaded.py").write_text(THREADED)
    fork_server = forked(folder)["fork_server"]
    if "log_path" in changes:
        changes = {"log_path": str(folder / changes["log_path"])}
    one = make(fork_server=fork_server | changes).ready()
    assert "environments/shim/__main__.py" in " ".join(
        psutil.Process(one.status["shim"]["pid"]).cmdline()
    )


def test_a_module_that_cannot_be_imported_is_logged_and_skipped(make: Make, folder: Path) -> None:
    folder.mkdir()
    fork_server = forked(folder)["fork_server"] | {"preload": ["no_such_module", "server_program"]}
    _fork_server_of(make(fork_server=fork_server).ready())
    assert "No module named 'no_such_module'" in (folder / "fork-server.log").read_text()


def test_an_entry_that_raises_is_an_exit_with_a_traceback(make: Make) -> None:
    one = make(entry="server_program:no_such_function").start()
    status = one.wait_state("exited")
    assert status["exit"]["exit_code"] == 1
    assert "AttributeError" in one.log()


def test_variables_read_at_start_need_another_fork_server(make: Make, folder: Path) -> None:
    one = _fork_server_of(make().ready())
    environ = forked(folder)["env"] | {"PYTHONHASHSEED": "7"}
    assert _fork_server_of(make(env=environ).ready()).pid != one.pid


def test_variables_read_at_start_are_passed_to_the_fork_server() -> None:
    environ = {"PATH": "/bin", "PYTHONUTF8": "1", "LC_ALL": "C", "TOKEN": "secret"}
    assert start_environment(environ) == {"PATH": "/bin", "PYTHONUTF8": "1", "LC_ALL": "C"}


def test_another_python_is_never_forked() -> None:
    assert may_fork({"entry": "m:f", "argv": [sys.executable]})
    assert not may_fork({"entry": "m:f", "argv": ["/other/python"]})
    assert not may_fork({"entry": None, "argv": [sys.executable]})


def test_all_listening_sockets_reach_a_forked_shim(make: Make) -> None:
    sockets = open_listening_sockets("127.0.0.1", 0)
    try:
        one = make(listen_fds=[each.fileno() for each in sockets]).ready()
        fds = one.link.request_listeners()
        close_all(fds)
        assert len(fds) == len(sockets) > 1
    finally:
        for each in sockets:
            each.close()
