# SPDX-License-Identifier: Apache-2.0
"""What replicas are said to hold."""

import os
from pathlib import Path
from typing import Any

from openenvd.system.memory.cgroups import CgroupManager
from openenvd.system.memory.usage import proportional_bytes, replica_bytes

from .conftest import Replica

MB = 1 << 20
FUZZ = 8 * MB  # the kernel counts in batches on each processor, and adds them up now and then


def held(status: dict[str, Any]) -> int:
    found = replica_bytes(status)
    assert found is not None
    return found


def test_a_replica_holds_what_its_server_and_children_hold(one: Replica) -> None:
    before = held(one.status)
    one.tell("eat 40")
    one.tell("sessions 1")
    status = one.wait(lambda s: s["sessions"] == 1)
    assert 40 * MB - FUZZ <= held(status) - before < 40 * MB + FUZZ
    # Without a cgroup it is counted by process, with its part of what the zygote has imported.
    assert 40 * MB <= held(status | {"cgroup": None}) < 70 * MB
    one.tell("exit 0")
    assert replica_bytes(one.wait_state("exited")) is None


def test_a_process_that_is_gone_holds_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert proportional_bytes(pid) == 0


def test_the_page_cache_is_not_held(cgroups: CgroupManager, tmp_path: Path) -> None:
    group = cgroups.create("cache")
    pid = os.fork()
    if pid == 0:
        group.add(os.getpid())
        (tmp_path / "file").write_bytes(b"x" * (20 * MB))
        os._exit(0)
    os.waitpid(pid, 0)
    assert (group.peak_bytes() or 0) - (group.held_bytes() or 0) >= 20 * MB - FUZZ
    assert group.held_bytes() is not None
    assert group.remove()
