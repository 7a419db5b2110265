# SPDX-License-Identifier: Apache-2.0
"""What the kernel has killed in the server's own cgroup, of files and of a real one."""

from __future__ import annotations

from pathlib import Path

from openenvd.env_host.supervisor.server_memory import ServerMemory
from openenvd.system.cgroup_tree import V2, Location


def test_kills_are_told_once_with_the_limit(tmp_path: Path) -> None:
    group = tmp_path / "openenvd" / "trial-0"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{300 << 20}\n")
    (group / "memory.events").write_text("oom 1\noom_kill 1\n")
    memory = ServerMemory(Location(V2, str(tmp_path), "/openenvd/trial-0"))
    assert memory.new_kills() is None  # it was before
    (group / "memory.events").write_text("oom 2\noom_kill 2\n")
    told = "when the kernel killed for memory: its server had reached the limit of 300 MB"
    assert memory.new_kills() == told
    assert memory.new_kills() is None


def test_nothing_is_told_without_a_cgroup_of_the_servers_own(tmp_path: Path) -> None:
    assert ServerMemory(Location(V2, str(tmp_path), "/gone")).new_kills() is None
