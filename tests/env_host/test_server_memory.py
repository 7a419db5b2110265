# SPDX-License-Identifier: Apache-2.0
"""What the kernel has killed in the server's own cgroup, of files and of a real one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from openenvd.env_host.supervisor.server_memory import DYING_SECONDS, LOOK_SECONDS, ServerMemory
from openenvd.system.cgroup_tree import V1, V2, Location

EXITED, SIGKILLED = 1 << 8, 9  # wait statuses
TOLD = "probably for memory: its replica's processes may use 300 MB together"


@pytest.fixture
def group(tmp_path: Path) -> Path:
    folder = tmp_path / "openenvd" / "trial-0"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{300 << 20}\n")
    count_kills(folder, 1)
    return folder


@pytest.fixture
def memory(tmp_path: Path, group: Path) -> ServerMemory:
    return ServerMemory(Location(V2, str(tmp_path), "/openenvd/trial-0"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def count_kills(folder: Path, count: int) -> None:
    (folder / "memory.events").write_text(f"oom {count}\noom_kill {count}\n")


def test_a_kill_is_told_once_with_the_limit(memory: ServerMemory, group: Path) -> None:
    assert memory.kill_of(SIGKILLED) is None  # it was before
    count_kills(group, 2)
    assert [memory.kill_of(SIGKILLED) for _ in range(2)] == [TOLD, None]


def test_each_of_two_that_are_killed_together_is_told(memory: ServerMemory, group: Path) -> None:
    count_kills(group, 3)
    assert [memory.kill_of(SIGKILLED) for _ in range(3)] == [TOLD, TOLD, None]


def test_another_exit_leaves_a_kill_to_its_victim(memory: ServerMemory, group: Path) -> None:
    count_kills(group, 2)
    assert memory.kill_of(EXITED) is None
    assert memory.kill_of(SIGKILLED) == TOLD


def test_a_kill_long_before_is_not_told(
    clock: list[float], memory: ServerMemory, group: Path
) -> None:
    """An environment's own process was killed, whose exit is not the server's to see."""
    count_kills(group, 2)
    clock[0] += LOOK_SECONDS
    memory.look()
    clock[0] += DYING_SECONDS
    count_kills(group, 3)
    assert [memory.kill_of(SIGKILLED) for _ in range(2)] == [TOLD, None]


@pytest.mark.parametrize(
    ("version", "name", "none"),
    [(V2, "memory.max", "max"), (V1, "memory.limit_in_bytes", str(2**63 - 4096))],
)
def test_a_limit_that_is_not_the_servers_own_is_not_named(
    tmp_path: Path, group: Path, version: int, name: str, none: str
) -> None:
    (tmp_path / name).write_text(f"{8 << 30}\n")
    (group / name).write_text(f"{none}\n")
    (group / "memory.oom_control").write_text("oom_kill 1\n")
    memory = ServerMemory(Location(version, str(tmp_path), "/openenvd/trial-0"))
    count_kills(group, 2)
    (group / "memory.oom_control").write_text("oom_kill 2\n")
    assert memory.kill_of(SIGKILLED) == "probably for memory"


def test_nothing_is_told_without_a_cgroup_of_the_servers_own(tmp_path: Path) -> None:
    assert ServerMemory(Location(V2, str(tmp_path), "/gone")).kill_of(SIGKILLED) is None
