# SPDX-License-Identifier: Apache-2.0
"""Tests of a daemon that is killed or replaced, and of read-only folders and full disks."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from openenvd.client import Session

from ..conftest import OPENENV, Machine, copy_package, eventually, free_port
from ..test_main_job import say_hello


def test_a_killed_daemon_comes_back_with_the_flags_that_it_was_given(machine: Machine) -> None:
    port = free_port()
    machine.ok("up", "--port", str(port), "--max-pending", "7")
    machine.kill_daemon()
    assert machine.status()["daemon"]["address"] == f"http://127.0.0.1:{port}"
    assert machine.ok("info", "--json").json["settings"]["max_pending"] == 7
    machine.ok("stop")
    assert machine.status()["daemon"]["address"] != f"http://127.0.0.1:{port}"


def test_a_daemon_whose_installation_is_removed_is_replaced_and_no_session_is_lost(
    machine: Machine, tmp_path: Path
) -> None:
    copy_package(tmp_path / "lib")
    machine.environ["PYTHONPATH"] = str(tmp_path / "lib")
    machine.ok("up", "--max-pending", "7")
    machine.ok("launch", "echo")
    before = machine.environment("echo")
    del machine.environ["PYTHONPATH"]
    with Session(before["address"]) as session:
        session.reset()
        shutil.rmtree(tmp_path / "lib")
        answer = machine.ok("status")
        assert f"runs from {tmp_path}/lib/openenvd, which was removed or replaced" in answer.err
        session.step({"message": "still here"})
    assert machine.ok("status").err == ""
    assert machine.ok("info", "--json").json["settings"]["max_pending"] == 7
    after = machine.environment("echo")
    assert (after["state"], after["address"]) == ("READY", before["address"])
    assert after["replicas"][0]["pid"] == before["replicas"][0]["pid"]


def test_up_ends_when_its_output_is_a_pipe(machine: Machine) -> None:
    piped = subprocess.run(
        f"'{OPENENV}' up | cat", shell=True, env=machine.environ, timeout=30, capture_output=True
    )
    assert piped.returncode == 0
    assert b"http://127.0.0.1:" in piped.stdout


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_home_that_becomes_read_only_is_named_and_its_daemon_can_be_stopped(
    machine: Machine,
) -> None:
    """Like a disk that the kernel remounts after errors: open files stay open."""
    machine.ok("launch", "echo")
    address, pid = machine.environment("echo")["address"], machine.daemon_pid
    folder = str(machine.home)
    for options in (["--bind", folder, folder], ["-o", "remount,ro,bind", folder]):
        if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
            pytest.skip("this machine does not let us mount")
    try:
        assert machine.environment("echo")["state"] == "READY"
        refused = machine.run("launch", "echo", "--name", "another")
        assert refused.code == 1, refused.text
        assert f"findmnt -T {folder}" in refused.text
        stopped = machine.ok("stop")
        assert f"stopped the daemon (pid {pid})" in stopped.text
        eventually(lambda: has_ended(pid))
        assert machine.ok("stop").out == "the daemon is not running\n"
        started = machine.run("up")
        assert started.code == 3, started.text
        assert f"the state folder {folder} is on a read-only file system" in started.err
        for told in (refused, started):
            assert "permissions" not in told.text
            assert "Traceback" not in told.text
        assert "Traceback" not in (machine.home / "daemon.log").read_text().partition("Shutting")[2]
        say_hello(address)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert machine.environment("echo")["address"] == address
    say_hello(address)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 24 MB; skips the test where none can be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_clearly_and_is_survived(machine: Machine, small_disk: Path) -> None:
    machine.home = small_disk / "home"
    machine.environ["OPENENV_HOME"] = str(machine.home)
    machine.ok("launch", "echo")
    address = machine.environment("echo")["address"]
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * (24 << 20))
    refused = None
    for number in range(200):  # the database may have free pages
        refused = machine.run("launch", "--async", "echo", "--name", f"echo-{number}")
        if refused.code != 0:
            break
    assert refused is not None
    assert refused.code == 1, refused.text
    assert f"no space left on the disk of {machine.home}" in refused.err
    assert f"df -h {machine.home}" in refused.err
    assert "openenv prune" in refused.err
    say_hello(address)
    machine.ok("prune")  # by what the daemon keeps for it
    filler.unlink()
    for request in machine.status()["requests"]:
        machine.run("wait", request["id"])
    machine.ok("launch", "echo", "--name", "afterwards")
    machine.ok("down", "--all")
    machine.ok("stop")
