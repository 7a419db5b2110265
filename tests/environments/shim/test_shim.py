# SPDX-License-Identifier: Apache-2.0
"""The shim's failure cases, one by one, as its docstring lists them."""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.environments.shim import client, files
from openenvd.environments.shim.server_exit import EXIT_CANNOT_START
from openenvd.schema import protocol
from openenvd.system.memory.cgroups import Cgroup, CgroupManager
from openenvd.system.net.listening_sockets import listening
from openenvd.system.process.exit_reason import Certainty, Detector, ExitKind, ExitReason
from openenvd.system.process.oom_evidence import kernel_log_kills, victims_cgroup
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.process.tree import wait_until_dead

from .conftest import WAIT_SECONDS, Replica

Make = Callable[..., Replica]
MB = 1 << 20
SHIM = Path(files.__file__).with_name("__main__.py")


def _needs_cgroups() -> None:
    manager = CgroupManager("probe")
    why_not = manager.why_not
    manager.remove()
    if why_not:
        pytest.skip(f"no memory cgroups here: {why_not}")


def _exit_of(status: dict[str, object]) -> ExitReason:
    reason = status["exit"]
    assert isinstance(reason, dict)
    return ExitReason.from_json(reason)


def test_its_variables_are_those_of_the_protocol() -> None:
    assert files.LISTEN_FD_VARIABLE == protocol.LISTEN_FD_VARIABLE
    assert files.NOTIFY_FD_VARIABLE == protocol.NOTIFY_FD_VARIABLE
    assert files.GATE_FD_VARIABLE == protocol.GATE_FD_VARIABLE
    assert files.TRIAL_VARIABLE == protocol.TRIAL_VARIABLE


def test_ready_status_has_message_and_identity_of_the_server(one: Replica) -> None:
    status = one.status
    assert status["info"]["max_sessions"] == 4
    assert ProcessIdentity(status["pid"], status["pid_started_at"]).is_alive()
    assert client.is_alive(one.link.status)
    assert (status["generation"], status["restarts"], status["exit"]) == (1, 0, None)
    run_file = client.read_run_file(one.run_dir)
    assert run_file is not None
    pid = run_file["shim"]["pid"]
    assert os.getsid(pid) != os.getsid(0)
    assert ProcessIdentity(pid, run_file["shim"]["started_at"]).is_alive()


WRITE_RUN_FILE = """
import sys
from openenvd.environments.shim.client import start_shim

folder = sys.argv[1]
start_shim(folder, {"socket_path": folder + "/x", "log_path": folder + "/replica.json/log"})
"""


def test_a_run_file_is_synced_before_it_takes_its_name(tmp_path: Path) -> None:
    """As the kernel sees it: the file, its name, the folder. No shim can be started after that."""
    trace = tmp_path / "trace"
    traced = "trace=fsync,rename,renameat,renameat2"
    strace = ["strace", "-f", "-y", "-e", traced, "-o", str(trace)]
    try:
        subprocess.run([*strace, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no strace here, or it may trace nothing")
    folder = tmp_path / "run"
    command = [sys.executable, "-c", WRITE_RUN_FILE, str(folder)]
    failed = subprocess.run([*strace, *command], check=False, capture_output=True, text=True)
    assert "FileExistsError" in failed.stderr
    calls = [line.split(None, 1)[1] for line in trace.read_text().splitlines() if "run" in line]
    kinds = [call.partition("(")[0] for call in calls]
    assert [kinds[0], kinds[1].rstrip("at2"), kinds[2]] == ["fsync", "rename", "fsync"]
    assert f"<{folder}/replica.json." in calls[0]
    assert f"<{folder}>" in calls[2]


def test_no_socket_is_left_when_the_run_file_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    run_file: Any = {"socket_path": str(path), "entry": object()}
    with pytest.raises(TypeError):
        client.start_shim(tmp_path / "run", run_file)
    assert not path.exists()


def test_a_held_server_serves_when_it_is_told_and_from_then_on(replica: Make) -> None:
    one = replica(held=True).ready()
    assert one.status["held"]
    one.tell("gate")
    one.wait(lambda status: status["sessions"] == 1)  # its gate is closed
    one.link.send("serve")
    assert one.wait(lambda status: not status["held"])["state"] == "ready"
    one.tell("gate")
    one.wait(lambda status: status["sessions"] == 2)
    run_file = client.read_run_file(one.run_dir)
    assert run_file is not None
    assert not run_file["held"]
    one.tell("exit 0")
    one.wait_state("exited")
    one.link.send("start")
    one.wait_state("ready", generation=2)
    one.tell("show OPENENVD_GATE_FD")
    one.tell("sessions 3")
    one.wait(lambda status: status["sessions"] == 3)
    assert "OPENENVD_GATE_FD None" in one.log()


@pytest.mark.parametrize("code", [0, 7])
def test_exit_code_is_reported(one: Replica, code: int) -> None:
    one.tell(f"exit {code}")
    reason = _exit_of(one.wait_state("exited"))
    assert (reason.kind, reason.exit_code) == (ExitKind.EXITED, code)


def test_a_signal_that_another_sent_is_reported_though_the_server_stops_in_order(
    one: Replica,
) -> None:
    one.tell("exit 0 15")
    assert _exit_of(one.wait_state("exited")).sentence() == "was killed by SIGTERM"


def test_server_over_its_limit_is_killed_for_memory_also_at_its_start(replica: Make) -> None:
    _needs_cgroups()
    one = replica(memory_limit_bytes=48 * MB).ready()
    one.tell("eat 200")
    reason = _exit_of(one.wait_state("exited"))
    assert (reason.kind, reason.detector) == (ExitKind.OOM_KILLED, Detector.CGROUP)
    assert reason.limit_bytes == 48 * MB
    assert reason.peak_bytes is not None
    assert 40 * MB < reason.peak_bytes <= 48 * MB
    for _ in range(5):  # it may be dead before, or after, the shim hears that it has started
        one = replica(memory_limit_bytes=1 * MB)
        one.start()
        assert _exit_of(one.wait_state("exited")).kind is ExitKind.OOM_KILLED


def test_a_shard_over_a_cap_of_its_own_is_explained_by_the_server(one: Replica) -> None:
    one.tell("lose_capped")
    status = one.wait(lambda s: s["shard_exits"] > 0)
    assert (status["state"], status["shard_exits"], status["exit"]) == ("ready", 1, None)
    reason = ExitReason.from_json(status["exits"][0]["reason"])
    assert (reason.kind, reason.detector) == (ExitKind.OOM_KILLED, Detector.WATCHDOG)
    assert reason.limit_bytes == MB


def test_failed_start_is_reported_with_the_last_log_lines(replica: Make) -> None:
    one = replica(words=["fail"]).start()
    status = one.wait_state("exited")
    assert status["failed"] == "ImportError: no such thing"
    assert status["log_tail"][-1] == "ImportError: no such thing"
    assert _exit_of(status).exit_code == 3


def test_program_that_does_not_exist_is_an_exit_with_127(replica: Make) -> None:
    one = replica(argv=["/no/such/program"]).start()
    status = one.wait_state("exited")
    assert _exit_of(status).exit_code == EXIT_CANNOT_START
    assert "/no/such/program" in status["failed"]


def test_port_in_use_is_reported_and_start_tries_again(replica: Make) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    one = replica(port=port).start()
    assert "in use" in one.wait_state("exited")["failed"]
    taken.close()
    one.link.send("start")
    assert one.wait_state("ready")["port"] == port


def test_a_client_that_connects_wakes_a_server_that_sleeps(one: Replica) -> None:
    one.tell("sleep 0")
    status = one.wait_state("asleep")
    assert (status["exit"], status["last_exit"], status["pid"]) == (None, None, None)
    with pytest.raises(TimeoutError):  # and goes on to sleep
        one.link.wait(lambda s: s["state"] != "asleep", timeout=0.2)
    with socket.create_connection((status["host"], status["port"])):
        status = one.wait_state("ready", generation=2)
    assert (status["restarts"], status["wakes"]) == (0, 1)
    one.tell("sleep 1")
    assert one.wait_state("exited")["exit"]["exit_code"] == 1


def test_a_client_that_connects_while_a_server_falls_asleep_wakes_the_next(one: Replica) -> None:
    with socket.create_connection((one.status["host"], one.status["port"])):
        one.tell("sleep 0")
        one.wait_state("ready", generation=2)


def test_a_shim_killed_while_its_server_sleeps_is_replaced_by_one_that_serves(one: Replica) -> None:
    one.tell("sleep 0")
    shim = ProcessIdentity.of(one.wait_state("asleep")["shim"]["pid"])
    os.kill(shim.pid, signal.SIGKILL)
    assert wait_until_dead([shim], WAIT_SECONDS)  # it loses its connection before its lock
    after = one.again().link.status
    assert (after["generation"], after["wakes"], after["exits"]) == (1, 0, [])


@pytest.mark.parametrize("op", ["stop", "drain"])
def test_a_shim_is_stopped_while_its_server_sleeps(one: Replica, op: str) -> None:
    one.tell("sleep 0")
    one.wait_state("asleep")
    one.link.send(op)
    one.wait_state("stopped")
    one.wait_for_end()


def test_start_changes_nothing_or_makes_a_new_generation(one: Replica) -> None:
    pid = one.status["pid"]
    one.link.send("start")
    one.tell("sessions 3")
    status = one.wait(lambda s: s["sessions"] == 3)
    assert (status["pid"], status["generation"]) == (pid, 1)
    before = one.status
    one.tell("exit 1")
    one.wait_state("exited")
    one.link.send("start")
    after = one.wait_state("ready", generation=2)
    assert after["port"] == before["port"]
    assert (after["restarts"], after["exit"]) == (1, None)
    assert after["last_exit"]["exit_code"] == 1


def test_stop_ends_server_and_shim_and_leaves_no_socket(one: Replica) -> None:
    server = ProcessIdentity(one.status["pid"], one.status["pid_started_at"])
    one.link.send("stop", grace_seconds=WAIT_SECONDS)
    assert _exit_of(one.wait_state("stopped")).kind is ExitKind.STOPPED
    assert not Path(one.run_file["socket_path"]).exists()
    assert not server.is_alive()
    one.wait_for_end()
    status = client.read_status_file(one.run_dir)
    assert status is not None
    assert status["state"] == "stopped"


def test_a_drained_server_is_not_started_again_when_its_sessions_have_ended(one: Replica) -> None:
    one.link.send("drain", timeout_seconds=3600.0)
    status = one.wait(lambda s: s["sessions"] == 41)  # the signal's
    assert (status["state"], status["is_draining"], status["exit"]) == ("draining", True, None)
    one.link.send("start")
    one.tell("exit 0")
    status = one.wait_state("stopped")
    assert (_exit_of(status).kind, status["is_draining"]) == (ExitKind.STOPPED, True)
    one.wait_for_end()
    assert not Path(one.run_file["socket_path"]).exists()


def test_a_crash_while_draining_is_reported_and_not_repaired(one: Replica) -> None:
    one.link.send("drain", timeout_seconds=3600.0)
    one.wait_state("draining")
    one.tell("exit 7")
    reason = _exit_of(one.wait_state("stopped"))
    assert (reason.kind, reason.exit_code) == (ExitKind.EXITED, 7)


def test_a_server_whose_sessions_do_not_end_in_time_is_stopped(one: Replica) -> None:
    """A second drain can only shorten the time."""
    one.link.send("drain", timeout_seconds=3600.0)
    one.wait_state("draining")
    one.link.send("drain", timeout_seconds=7200.0)
    one.link.send("drain", timeout_seconds=0.0)
    assert _exit_of(one.wait_state("stopped")).signal_name == "SIGTERM"


def test_orphans_of_the_server_are_killed_when_it_exits(one: Replica) -> None:
    """Even a grandchild in a session of its own, whose parent is long gone."""
    one.tell("orphan")
    status = one.wait(lambda s: s["sessions"] > 0)
    orphan = ProcessIdentity.of(status["sessions"])
    one.tell("exit 0")
    one.wait_state("exited")
    assert not orphan.is_alive()


def test_sigterm_to_the_shim_is_a_stop(one: Replica) -> None:
    os.kill(one.status["shim"]["pid"], signal.SIGTERM)
    one.wait_state("stopped")


def test_server_of_a_killed_shim_is_killed_and_its_orphans_can_be_stopped(one: Replica) -> None:
    one.tell("orphan")
    status = one.wait(lambda s: s["sessions"] > 0)
    orphan = ProcessIdentity.of(status["sessions"])
    server = ProcessIdentity(status["pid"], status["pid_started_at"])
    os.kill(status["shim"]["pid"], signal.SIGKILL)
    one.wait_for_end()
    assert wait_until_dead([server], WAIT_SECONDS)
    client.clean_up_after_shim(one.run_dir)
    if status["cgroup"] is None:
        os.kill(orphan.pid, signal.SIGKILL)  # only a cgroup finds it again
    assert wait_until_dead([orphan], WAIT_SECONDS)


def test_after_an_orderly_stop_nothing_is_looked_for(one: Replica) -> None:
    """Not even a process that the status names: to look for its tree is to read all of /proc."""
    one.link.send("stop", grace_seconds=0.0)
    one.wait_state("stopped")
    one.wait_for_end()
    path = Path(one.run_dir) / files.STATUS_FILE_NAME
    status = json.loads(path.read_text())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        identity = ProcessIdentity.of(other.pid)
        named = {"pid": identity.pid, "pid_started_at": identity.started_at}
        path.write_text(json.dumps(status | named))
        client.clean_up_after_shim(one.run_dir)
        assert identity.is_alive()
        path.write_text(json.dumps(status | named | {"state": "ready"}))
        client.clean_up_after_shim(one.run_dir)
        assert other.wait(WAIT_SECONDS) == -signal.SIGKILL


def test_shim_and_server_exit_when_their_home_was_removed(replica: Make) -> None:
    """Not ready, it looks round often."""
    silent = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
    one = replica(argv=silent, entry=None).start()
    status = one.wait(lambda s: s["pid"] is not None)
    kept = ProcessIdentity(status["pid"], status["pid_started_at"])
    shutil.rmtree(one.run_dir)
    one.wait_state("stopped")
    one.wait_for_end()
    assert not kept.is_alive()


def test_the_last_shim_of_a_removed_home_takes_the_folder_of_sockets_along(
    replica: Make, tmp_path: Path
) -> None:
    silent = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    one, other = (
        replica(argv=silent, entry=None, socket_path=str(sockets / f"{name}.sock")).start()
        for name in ("one", "other")
    )
    for each in (one, other):
        each.wait(lambda s: s["pid"] is not None)
    shutil.rmtree(one.run_dir)
    one.wait_for_end()
    assert [path.name for path in sockets.iterdir()] == ["other.sock"]
    shutil.rmtree(other.run_dir)
    other.wait_for_end()
    assert not sockets.exists()


def test_a_shim_without_clients_is_found_again(one: Replica) -> None:
    """What happened meanwhile is in the status file, and is sent to a client that connects."""
    pid = one.status["pid"]
    one.link.close()
    one._link = None
    assert one.status["pid"] == pid
    one.link.close()
    one._link = None
    os.kill(pid, signal.SIGSEGV)
    status = one.wait_state("exited")
    assert _exit_of(status).signal_name == "SIGSEGV"
    written = client.read_status_file(one.run_dir)
    assert written is not None
    assert written["exit"] == status["exit"]


def test_a_shim_computes_nothing_while_nothing_happens(one: Replica) -> None:
    shim = psutil.Process(one.status["shim"]["pid"])
    before = sum(shim.cpu_times()[:2])
    began = time.process_time()
    while time.process_time() - began < 1.0:  # so that a busy machine gives the shim time, too
        pass
    assert sum(shim.cpu_times()[:2]) - before <= 0.03


def test_two_clients_hear_the_same(one: Replica) -> None:
    with one.connect() as other:
        one.tell("exit 5")
        assert one.wait_state("exited") == other.wait(
            lambda s: s["state"] == "exited", WAIT_SECONDS
        )


def test_dozens_of_leaving_clients_do_not_disturb_the_shim(one: Replica) -> None:
    """They leave while the shim is writing to all of them."""
    for number in range(1, 50):
        leaving = [one.connect() for _ in range(5)]
        one.tell(f"sessions {number}")
        for link in leaving:
            link.close()
    assert one.wait(lambda s: s["sessions"] == 49)["state"] == "ready"


def test_shims_that_come_and_go_at_once_all_get_their_groups(replica: Make) -> None:
    _needs_cgroups()
    leaving = [replica().ready() for _ in range(3)]
    coming = [replica() for _ in range(3)]
    for old, new in zip(leaving, coming, strict=True):
        old.link.send("stop", grace_seconds=0.0)
        new.start()
    for new in coming:
        assert new.wait_state("ready")["cgroup"] is not None


def test_no_half_invalid_or_endless_line_disturbs_the_shim(one: Replica) -> None:
    leaving = socket.socket(socket.AF_UNIX)
    leaving.connect(one.run_file["socket_path"])
    leaving.sendall(b'{"op": "st')
    leaving.close()
    one.link._socket.sendall(b"nonsense\n[1]\n" + b'{"op": "stop", "grace_seconds": []}\n')
    one.link._socket.sendall(b'{"op": ' * 9000 + b"\n")  # deeper than may be recursed
    one.link._socket.sendall(b'{"op": "stop", "grace_seconds": ' + b"9" * 400 + b"}\n")
    one.tell("sessions 2")
    assert one.wait(lambda s: s["sessions"] == 2)["state"] == "ready"
    with one.connect() as other:
        with contextlib.suppress(OSError):
            other._socket.sendall(b"x" * (1 << 20))
        with pytest.raises(client.ShimGone):
            other.wait(lambda _: False, WAIT_SECONDS)
        assert one.status["state"] == "ready"


def test_client_that_does_not_read_never_blocks_the_shim(one: Replica) -> None:
    deaf = socket.socket(socket.AF_UNIX)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    deaf.connect(one.run_file["socket_path"])
    for number in range(1, 2000):
        one.tell(f"sessions {number}")
    assert one.wait(lambda s: s["sessions"] == 1999)["state"] == "ready"
    one.link.send("stop", grace_seconds=0.0)
    one.wait_state("stopped")
    deaf.close()


def test_listeners_are_handed_over_and_serve_the_same_port(one: Replica) -> None:
    with contextlib.ExitStack() as stack:
        fds = one.link.request_listeners()
        sockets = [stack.enter_context(socket.socket(fileno=fd)) for fd in fds]
        assert {each.getsockname()[1] for each in sockets} == {one.status["port"]}
        with socket.create_connection(sockets[0].getsockname()):
            ready, _, _ = select.select(listening(sockets), [], [], 5.0)
            ready[0].accept()[0].close()


def test_second_shim_of_a_run_directory_leaves(one: Replica, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-I", str(SHIM), str(one.run_dir)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 1
    assert "another shim" in run.stderr
    assert one.status["state"] == "ready"


def test_server_has_its_log_variables_signals_and_oom_score(one: Replica) -> None:
    for name in ("SECRET", "HOME", "OPENENVD_CONTROL_FD"):
        one.tell(f"show {name}")
    one.tell("sessions 1")
    one.wait(lambda s: s["sessions"] == 1)
    assert "SECRET xyz\nHOME None\nOPENENVD_CONTROL_FD None\n" in one.log()
    assert f"server {one.status['pid']}" in one.log()
    pid = one.status["pid"]
    ignored = next(
        int(line.split()[1], 16)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    )
    # SIGPIPE is Python's own to ignore, and SIGXFSZ
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        assert not ignored & (1 << (number - 1))
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"


def test_log_is_kept_bounded_while_the_server_writes(replica: Make) -> None:
    one = replica(max_log_bytes=20_000).ready()
    for number in range(3000):
        one.tell(f"print line-{number} {'x' * 40}")
    one.tell("exit 0")
    one.wait_state("exited")
    assert Path(one.run_file["log_path"]).stat().st_size <= 20_000
    assert one.status["log_tail"][-1].startswith("line-2999")
    one.link.send("start")  # looks at once
    one.wait_state("ready", generation=2)
    assert Path(one.run_file["log_path"]).stat().st_size <= 20_000
    assert "line-2999" in one.log()


def test_log_is_kept_bounded_while_a_server_prints_that_is_not_ready(replica: Make) -> None:
    chatter = "import time\nwhile True:\n    print('x' * 99, flush=True)\n    time.sleep(0.0005)\n"
    one = replica(max_log_bytes=20_000, argv=[sys.executable, "-c", chatter], entry=None).start()
    deadline = time.monotonic() + WAIT_SECONDS
    while "earlier lines were dropped" not in one.log():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert one.status["state"] == "starting"


def test_full_disk_silences_the_status_file_but_not_the_shim(one: Replica) -> None:
    """A file is where the run directory was, which fails every write the same way. (Were there
    nothing, its home would have been removed, and the shim would end.)"""
    moved = one.run_dir.rename(one.run_dir.with_name("moved"))
    one.run_dir.touch()
    one.tell("exit 4")
    assert _exit_of(one.wait_state("exited")).exit_code == 4
    one.link.send("start")
    one.wait_state("ready", generation=2)
    one.run_dir.unlink()
    moved.rename(one.run_dir)


def test_a_shim_is_not_picked_first_though_the_worker_that_started_it_is(replica: Make) -> None:
    mine = Path("/proc/self/oom_score_adj")
    before = mine.read_text()
    mine.write_text("600")
    try:
        one = replica().ready()
    finally:
        mine.write_text(before)
    server = one.status["pid"]
    shim = psutil.Process(server).ppid()
    assert Path(f"/proc/{shim}/oom_score_adj").read_text().strip() == "0"
    assert Path(f"/proc/{server}/oom_score_adj").read_text().strip() == "500"


def test_connecting_without_a_shim_that_accepts_raises_shim_gone(tmp_path: Path) -> None:
    with pytest.raises(client.ShimGone, match="no shim answers"):
        client.ShimClient.connect(str(tmp_path / "none.sock"), 1.0)
    path = os.fspath(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
        deaf.bind(path)
        deaf.listen(0)
        with contextlib.suppress(BlockingIOError):  # the kernel's queue is full
            for _ in range(8):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(client.ShimGone, match="no shim answers"):
            client.ShimClient.connect(path, timeout=0.2)


def test_connection_ends_at_once_when_the_shims_python_cannot_start(
    replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control socket closes with it, so that no client waits for a time-out."""
    one = replica()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    client.start_shim(one.run_dir, one.run_file)
    with pytest.raises(client.ShimGone), one.connect() as link:
        link.wait(lambda _: True, WAIT_SECONDS)


def test_a_shim_killed_before_its_first_status_leaves_no_cgroup(
    replica: Callable[..., Replica],
) -> None:
    """Its run file names the cgroup, before there is one."""
    _needs_cgroups()
    kept = replica()
    (kept.run_dir / "status.json").mkdir(parents=True)  # so that none can be written
    status = kept.start().wait_state("ready")
    group = Cgroup.from_json(status["cgroup"])
    shim = ProcessIdentity(status["shim"]["pid"], status["shim"]["started_at"])
    os.kill(shim.pid, signal.SIGKILL)
    kept.wait_for_end()
    assert group.exists()
    client.clean_up_after_shim(kept.run_dir)
    assert not group.exists()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_signal_by_hand_is_that_signal_and_never_out_of_memory(
    replica: Make, number: signal.Signals
) -> None:
    one = replica(memory_limit_bytes=64 * MB).ready()
    os.kill(one.status["pid"], number)
    reason = _exit_of(one.wait_state("exited"))
    assert (reason.kind, reason.signal_name) == (ExitKind.SIGNALED, number.name)


def test_kill_of_a_grandchild_for_memory_leaves_the_server_alone(replica: Make) -> None:
    """It is counted; a later `kill -9` of the server by hand is not blamed on memory.

    Only the kernel log can tell the two apart. Where it has no line of the grandchild (no right to
    read it, or overwritten meanwhile), memory is named as probable.
    """
    _needs_cgroups()
    started = time.monotonic()
    one = replica(memory_limit_bytes=48 * MB).ready()
    pid = one.status["pid"]
    one.tell("child_eats 200")
    status = one.wait(lambda s: s["sessions"] == -signal.SIGKILL)
    assert (status["state"], status["pid"]) == ("ready", pid)
    cgroups = [victims_cgroup(line) for line in kernel_log_kills(started)]
    # The kernel names cgroups of ten victims in five seconds, and leaves out those of more.
    is_logged = any(name is None or name.endswith(one.run_file["replica_id"]) for name in cgroups)
    os.kill(pid, signal.SIGKILL)
    reason = _exit_of(one.wait_state("exited"))
    if not is_logged:
        assert (reason.kind, reason.certainty) == (ExitKind.OOM_KILLED, Certainty.PROBABLE)
        return
    assert (reason.kind, reason.signal_name) == (ExitKind.SIGNALED, "SIGKILL")
    assert "was killed: cgroup" in (reason.evidence or "")


def test_server_that_ignores_sigterm_is_killed_after_the_shortest_grace(replica: Make) -> None:
    one = replica().ready()
    one.tell("ignore_sigterm")
    one.wait(lambda s: s["sessions"] == 99)
    for grace_seconds in (3600.0, 0.05, 7200.0):
        one.link.send("stop", grace_seconds=grace_seconds)
    reason = _exit_of(one.wait_state("stopped"))
    assert (reason.kind, reason.signal_name) == (ExitKind.STOPPED, "SIGKILL")
