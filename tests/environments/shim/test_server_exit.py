# SPDX-License-Identifier: Apache-2.0
"""What a shim keeps of the kernel's counters until a killed server is reaped."""

from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.shim.server_exit import DYING_SECONDS, ExitEvidence
from openenvd.system.memory.cgroup_tree import V2
from openenvd.system.memory.cgroups import Cgroup

SIGKILLED = 9  # the wait status
KILL: dict[str, Any] = {"reason": {"kind": "oom_killed", "signal_number": SIGKILLED}}
PID = 4_194_304  # above what the kernel gives, so that its log has none


def count_kills(folder: Path, count: int) -> None:
    (folder / "memory.events").write_text(f"oom_kill {count}\n")


@pytest.mark.parametrize(
    ("kills", "seconds", "child", "kind"),
    [
        # On a busy machine a victim is reaped several looks after it was counted.
        (1, DYING_SECONDS / 2, None, "oom_killed"),
        (1, DYING_SECONDS, None, "signaled"),  # that kill was long before
        # A moment after the server has told of another process's kill, it is killed by hand.
        (1, 0.0, KILL, "signaled"),
        (1, 0.0, KILL | {"programs": 1}, "signaled"),
        (2, 0.0, KILL, "oom_killed"),  # one kill is its own
        # An exit of a child that was no kill takes no evidence from the server.
        (1, 0.0, {"reason": {"kind": "exited", "exit_code": 1}}, "oom_killed"),
        (1, 0.0, {"reason": {"kind": "signaled", "signal_number": SIGKILLED}}, "oom_killed"),
    ],
)
def test_a_killed_server_was_killed_for_memory_by_what_was_counted_and_told_before(
    tmp_path: Path,
    clock: list[float],
    kills: int,
    seconds: float,
    child: dict[str, Any] | None,
    kind: str,
) -> None:
    count_kills(tmp_path, 0)
    evidence = ExitEvidence(None)
    evidence.begin(Cgroup(str(tmp_path), "openenvd/sample", V2))
    evidence.look()
    count_kills(tmp_path, kills)
    if child is None:
        for _ in range(5):
            evidence.look()
        clock[0] += seconds
        evidence.look()
    else:
        evidence.note_child(child)
    found = evidence.explain(PID, (SIGKILLED, 0), stopped_by_us=False, failed=None)
    assert found["kind"] == kind
