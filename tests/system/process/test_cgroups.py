# SPDX-License-Identifier: Apache-2.0
"""Cgroups: real ones where the machine lets us, trees of files for version 2."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.system.memory.cgroup_tree import V1, V2
from openenvd.system.memory.cgroups import Cgroup, CgroupManager

MB = 1 << 20
EAT = "import sys; sys.stdin.readline(); block = bytearray(b'x') * (int(sys.argv[1]) << 20)"


def _eater(megabytes: int) -> subprocess.Popen[bytes]:
    """A process that waits for a line, then takes that much memory."""
    argv = [sys.executable, "-I", "-S", "-c", EAT, str(megabytes)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE)


def test_kernel_kills_are_counted_and_the_limit_can_be_changed(cgroups: CgroupManager) -> None:
    cgroup = cgroups.create("one", 40 * MB)
    with _eater(200) as process:
        cgroup.add(process.pid)
        assert cgroup.pids() == [process.pid]
        process.communicate(b"\n")
    assert process.returncode == -signal.SIGKILL
    assert cgroup.oom_kills() == 1
    assert 30 * MB < (cgroup.peak_bytes() or 0) <= 40 * MB
    assert cgroup.remove()
    cgroup = cgroups.create("two", 40 * MB)
    with _eater(1) as process:
        cgroup.add(process.pid)
        process.kill()
    assert cgroup.oom_kills() == 0
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    with pytest.raises(OSError, match=r"cgroup\.procs"):
        cgroups.create("one").add(process.pid)
    cgroup = cgroups.create("one", 40 * MB)
    for limit in (80 * MB, 20 * MB, None, 40 * MB):
        cgroup.set_limit(limit)
        assert limit_of(cgroup) == limit
    again = Cgroup.from_json(cgroup.to_json())
    assert (again.exists(), limit_of(again), again.name) == (True, 40 * MB, "openenvd/one")


def test_kill_ends_everything_inside(cgroups: CgroupManager) -> None:
    cgroup = cgroups.create("one")
    processes = [_eater(1) for _ in range(3)]
    for process in processes:
        cgroup.add(process.pid)
    assert not cgroup.remove()
    cgroup.kill()
    for process in processes:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert cgroup.pids() == []
    assert cgroup.remove()
    assert cgroup.remove()


def limit_of(cgroup: Cgroup) -> int | None:
    """The group's own cap; None when it has none."""
    names = (Path(cgroup.directory, name) for name in ("memory.limit_in_bytes", "memory.max"))
    text = next(path.read_text() for path in names if path.exists())
    return int(text) if text.strip().isdigit() and int(text) < 1 << 60 else None


def test_group_made_from_inside_a_group_stands_beside_it(cgroups: CgroupManager) -> None:
    """A capped worker's shim is not capped with it."""
    inner = cgroups.create("worker", 200 * MB)
    program = (
        "import sys; sys.stdin.readline()\n"
        "from openenvd.system.memory.cgroups import CgroupManager\n"
        "print(CgroupManager(sys.argv[1]).directory)"
    )
    argv = [sys.executable, "-c", program, cgroups.name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        inner.add(process.pid)
        output, _ = process.communicate(b"\n")
    assert output.decode().strip() == cgroups.directory


def _v2_tree(root: Path, path: str = "/", controllers: str = "cpu memory pids") -> Path:
    """What a v2 hierarchy looks like from files; writes land in plain files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{path}\n")
    (root / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    )
    group = root / "sys/fs/cgroup"
    for part in ("", *path.strip("/").split("/")):
        group = group / part
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers)
        (group / "cgroup.subtree_control").write_text("")
        (group / "cgroup.procs").write_text("")
    return group


def test_v2_hands_the_memory_controller_down_on_the_whole_way(tmp_path: Path) -> None:
    group = _v2_tree(tmp_path, "/a")
    for below in ("openenvd", "openenvd/x"):
        (group / below).mkdir()
        (group / below / "cgroup.subtree_control").write_text("")
    manager = CgroupManager("x", root=str(tmp_path))
    assert manager.available, manager.why_not
    for level in ("", "openenvd", "openenvd/x"):
        assert (group / level / "cgroup.subtree_control").read_text() == "+memory"


def test_a_missing_hierarchy_or_memory_controller_is_the_reason_given(tmp_path: Path) -> None:
    manager = CgroupManager("x", root=str(tmp_path))
    assert "no cgroup hierarchy" in manager.why_not
    assert manager.remove()
    _v2_tree(tmp_path, "/a", controllers="cpu")
    manager = CgroupManager("x", root=str(tmp_path))
    assert not manager.available
    assert "no memory controller" in manager.why_not
    with pytest.raises(OSError, match="no memory controller"):
        manager.create("one")


@pytest.fixture
def v2_group(tmp_path: Path) -> Cgroup:
    for name, text in {
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.current": "4096\n",
        "memory.peak": "8192\n",
        "memory.events": "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n",
        "cgroup.procs": "5\n6\n",
        "cgroup.kill": "",
    }.items():
        (tmp_path / name).write_text(text)
    return Cgroup(str(tmp_path), "openenvd/long-3", V2)


def test_v2_files_are_read_and_written(v2_group: Cgroup) -> None:
    assert v2_group.oom_kills() == 1
    assert (v2_group.peak_bytes(), v2_group.held_bytes()) == (8192, 4096)
    assert (v2_group.pids(), limit_of(v2_group)) == ([5, 6], None)
    v2_group.set_limit(MB)
    assert limit_of(v2_group) == MB
    assert Path(v2_group.directory, "memory.swap.max").read_text().startswith("0")
    v2_group.kill()  # is one write
    assert Path(v2_group.directory, "cgroup.kill").read_text() == "1"


def test_a_group_that_is_gone_has_nothing_to_say(tmp_path: Path) -> None:
    gone = Cgroup(str(tmp_path / "gone"), "gone", V1)
    assert (gone.oom_kills(), gone.peak_bytes(), gone.pids()) == (0, None, [])
    gone.kill()
    assert gone.remove()
