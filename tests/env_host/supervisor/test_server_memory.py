# SPDX-License-Identifier: Apache-2.0
"""Whose a kill for memory was that the kernel has counted, of files and of real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.env_host.supervisor import memory
from openenvd.system.memory.cgroup_tree import V1, V2
from openenvd.system.memory.cgroups import Cgroup
from openenvd.system.process.proc import is_dying

SIGKILLED = 9
OTHER_EXITS = [0, 1 << 8, signal.SIGTERM, signal.SIGSEGV]  # wait statuses


@pytest.fixture
def kills(tmp_path: Path) -> memory.KillCount:
    count_kills(tmp_path, 1)
    return memory.KillCount(Cgroup(str(tmp_path), "openenvd/trial-0", V2))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def count_kills(folder: Path, count: int) -> None:
    (folder / "memory.events").write_text(f"oom {count}\noom_kill {count}\n")


def killed_for_memory(kills: memory.KillCount, wait_status: int = SIGKILLED) -> bool:
    return memory.was_for_memory(kills.evidence_of(wait_status), wait_status)


def test_a_kill_is_of_one_exit(kills: memory.KillCount, tmp_path: Path) -> None:
    assert not killed_for_memory(kills)  # it was before
    count_kills(tmp_path, 2)
    assert [killed_for_memory(kills) for _ in range(2)] == [True, False]


def test_each_of_two_that_are_killed_together_is_told(
    kills: memory.KillCount, tmp_path: Path
) -> None:
    count_kills(tmp_path, 3)
    assert [killed_for_memory(kills) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("first", OTHER_EXITS)
def test_another_exit_leaves_a_kill_to_its_victim(
    kills: memory.KillCount, tmp_path: Path, first: int
) -> None:
    count_kills(tmp_path, 2)
    assert not killed_for_memory(kills, first)
    assert killed_for_memory(kills)


@pytest.mark.parametrize(("wait_status", "programs"), [(0, 2), (SIGKILLED, 1)])
def test_what_the_last_exit_in_a_group_does_not_explain_was_a_program(
    kills: memory.KillCount, tmp_path: Path, wait_status: int, programs: int
) -> None:
    count_kills(tmp_path, 3)
    kills.evidence_of(wait_status)
    assert [kills.take_rest() for _ in range(2)] == [programs, 0]


def looked(kills: memory.KillCount, clock: list[float], *pids: int) -> int:
    clock[0] += memory.POLL_INTERVAL_SECONDS
    return kills.take_others(pids)


def test_a_kill_of_no_process_of_ours_is_of_a_program_that_the_environment_had_started(
    kills: memory.KillCount, tmp_path: Path, clock: list[float], process: subprocess.Popen[bytes]
) -> None:
    """It is told once; a `kill -9` by hand afterwards is none for memory."""
    assert looked(kills, clock, process.pid) == 0
    count_kills(tmp_path, 3)
    assert memory.POLL_INTERVAL_SECONDS > memory.SETTLE_SECONDS
    assert kills.due(is_used=False) is None
    assert looked(kills, clock, process.pid) == 0
    assert kills.due(is_used=False) is not None  # also when its session has ended by then
    assert [looked(kills, clock, process.pid) for _ in range(2)] == [2, 0]
    assert kills.due(is_used=False) is None
    assert not killed_for_memory(kills)


def test_a_kill_is_left_to_a_process_of_ours_that_is_dying(
    kills: memory.KillCount, tmp_path: Path, clock: list[float], process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet
    count_kills(tmp_path, 2)
    assert [looked(kills, clock, process.pid) for _ in range(3)] == [0, 0, 0]
    assert killed_for_memory(kills)
    assert looked(kills, clock) == 0


def test_a_process_that_never_dies_holds_up_no_report(
    kills: memory.KillCount, tmp_path: Path, clock: list[float], process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    count_kills(tmp_path, 2)
    assert looked(kills, clock, process.pid) == 0
    clock[0] += memory.DYING_SECONDS
    assert looked(kills, clock, process.pid) == 1


def test_a_stopped_process_is_dying_once_it_is_killed(process: subprocess.Popen[bytes]) -> None:
    assert not is_dying(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dying(process.pid)


@pytest.mark.parametrize(
    ("version", "name", "counter", "none"),
    [
        (V2, "memory.max", "memory.events", "max"),
        (V1, "memory.limit_in_bytes", "memory.oom_control", str(2**63 - 4096)),
    ],
)
def test_the_limit_is_the_groups_own(
    tmp_path: Path, version: int, name: str, counter: str, none: str
) -> None:
    (tmp_path / name).write_text(f"{none}\n")
    (tmp_path / counter).write_text("oom_kill 1\n")
    kills = memory.KillCount(Cgroup(str(tmp_path), "trial-0", version))
    counted = {"oom_kills": [1, 2]}
    assert memory.memory_clause(kills, counted) == "probably for memory: oom_kill 1→2"
    (tmp_path / name).write_text(f"{300 << 20}\n")
    peak = "memory.peak" if version == V2 else "memory.max_usage_in_bytes"
    (tmp_path / peak).write_text(f"{299 << 20}\n")
    assert memory.memory_clause(kills, counted) == (
        "probably for memory: its replica's processes may use 300 MB together, "
        "they held 299 MB together at most, oom_kill 1→2"
    )
    of_job = memory.KillCount(
        Cgroup(str(tmp_path / "task"), "task", version), limit_bytes=200 << 20
    )
    assert of_job.limit_bytes == 200 << 20
    (tmp_path / counter).write_text("oom_kill 2\n")
    assert kills.evidence_of(SIGKILLED) == {"oom_kills": [1, 2], "cgroup": "trial-0"}


def test_without_a_cgroup_the_machines_counter_is_told_and_proves_nothing(tmp_path: Path) -> None:
    evidence = memory.KillCount(None).evidence_of(SIGKILLED)
    assert list(evidence) in ([], ["machine_oom_kills"])
    assert not memory.was_for_memory(evidence, SIGKILLED)
