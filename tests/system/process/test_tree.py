# SPDX-License-Identifier: Apache-2.0
"""Whole trees are stopped, whatever has become of their parents."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.system.memory.cgroups import CgroupManager
from openenvd.system.process.proc import ProcessStat, set_oom_score_adj
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.process.tree import descendants, stop_tree, tree_of, wait_until_dead

# A parent and a child; each prints its pid once it is set up, then sleeps.
PROGRAM = """
import os, signal, sys, time
words = sys.argv[1:]
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if "escape" in words:
        os.setsid()
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(3600)
if "leave" in words:
    os._exit(0)
os.write(1, b"%d\\n" % os.getpid())
time.sleep(3600)
"""


class Family:
    """A parent that leads its own session, and its child."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, *words],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.parent = ProcessIdentity.of(self.process.pid)
        assert self.process.stdout is not None
        found = {int(self.process.stdout.readline()) for _ in range(1 if "leave" in words else 2)}
        (child,) = found - {self.parent.pid}
        self.child = ProcessIdentity.of(child)

    def close(self) -> None:
        self.child.signal(signal.SIGKILL)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    made = Family(*getattr(request, "param", ()))
    yield made
    made.close()


def test_a_tree_of_parent_and_child_is_stopped_and_no_other_process(family: Family) -> None:
    assert tree_of(family.parent.pid) == [family.parent, family.child]
    assert set_oom_score_adj(family.child.pid, 900)
    assert Path(f"/proc/{family.child.pid}/oom_score_adj").read_text() == "900\n"
    earlier = ProcessIdentity(family.parent.pid, family.parent.started_at - 1.0)
    assert stop_tree(earlier, grace_seconds=0.0) == []
    assert family.child.is_alive()
    assert stop_tree(ProcessIdentity(0, 0.0), grace_seconds=0.0) == []
    assert stop_tree(ProcessIdentity(1, 0.0), grace_seconds=0.0) == []
    assert not wait_until_dead([family.parent], 0.0)
    assert not set_oom_score_adj(2**22 + 1, 0)
    ended = stop_tree(family.parent, grace_seconds=30.0)
    assert set(ended) == {family.parent.pid, family.child.pid}
    assert not family.child.is_alive()
    assert family.process.wait() == -signal.SIGTERM
    assert stop_tree(family.parent, grace_seconds=30.0) == []
    family.process.wait()
    assert stop_tree(family.parent, grace_seconds=30.0) == []


@pytest.mark.parametrize("family", [("stubborn",)], indirect=True)
def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(family: Family) -> None:
    stop_tree(family.parent, grace_seconds=0.05)
    assert family.process.wait() == -signal.SIGKILL
    assert not family.child.is_alive()


@pytest.mark.parametrize("family", [("leave",)], indirect=True)
def test_orphan_is_found_by_its_session_when_the_parent_is_gone(family: Family) -> None:
    family.process.wait()
    assert tree_of(family.parent.pid) == [family.child]
    assert stop_tree(family.parent, grace_seconds=30.0) == [family.child.pid]


@pytest.mark.parametrize("family", [("leave", "escape")], indirect=True)
def test_orphan_in_its_own_session_is_found_by_the_cgroup(
    family: Family, cgroups: CgroupManager
) -> None:
    cgroup = cgroups.create("tree")
    cgroup.add(family.child.pid)
    family.process.wait()
    assert stop_tree(family.parent, grace_seconds=0.0) == []
    assert stop_tree(family.parent, grace_seconds=0.0, cgroup=cgroup) == [family.child.pid]


def test_descendants_are_found_over_generations() -> None:
    def stat(pid: int, parent: int) -> ProcessStat:
        return ProcessStat(pid, "x", "S", parent, pid, pid, 0.0)

    stats = [stat(1, 0), stat(2, 1), stat(3, 2), stat(4, 1), stat(5, 3)]
    assert descendants(stats, 2) == {2, 3, 5}
