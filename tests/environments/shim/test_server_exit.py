# SPDX-License-Identifier: Apache-2.0
"""What a shim keeps of the kernel's counters until a killed server is reaped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments.shim.server_exit import DYING_SECONDS, ExitEvidence
from openenvd.system.memory.cgroup_tree import V2
from openenvd.system.memory.cgroups import Cgroup

SIGKILLED = 9  # the wait status
PID = 4_194_304  # above what the kernel gives, so that its log has none


@pytest.fixture
def group(tmp_path: Path) -> Cgroup:
    count_kills(tmp_path, 0)
    return Cgroup(str(tmp_path), "openenvd/sample", V2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def count_kills(folder: Path, count: int) -> None:
    (folder / "memory.events").write_text(f"oom_kill {count}\n")


def begun(group: Cgroup) -> ExitEvidence:
    evidence = ExitEvidence(None)
    evidence.begin(group)
    evidence.look()
    return evidence


def kind_of_kill(evidence: ExitEvidence) -> str:
    found: str = evidence.explain(PID, (SIGKILLED, 0), stopped_by_us=False, failed=None)["kind"]
    return found


def test_a_victim_that_dies_slowly_was_killed_for_memory(
    group: Cgroup, tmp_path: Path, clock: list[float]
) -> None:
    """On a busy machine it is reaped several looks after it was counted."""
    evidence = begun(group)
    count_kills(tmp_path, 1)
    assert [evidence.look() for _ in range(5)] == [True, False, False, False, False]
    clock[0] += DYING_SECONDS / 2
    evidence.look()
    assert kind_of_kill(evidence) == "oom_killed"


def test_a_kill_for_memory_long_before_is_not_what_ended_the_server(
    group: Cgroup, tmp_path: Path, clock: list[float]
) -> None:
    evidence = begun(group)
    count_kills(tmp_path, 1)
    evidence.look()
    clock[0] += DYING_SECONDS
    evidence.look()
    assert kind_of_kill(evidence) == "signaled"


def kind_of_child(evidence: ExitEvidence, **facts: Any) -> str:
    found: str = evidence.explain_child({"pid": PID, "wait_status": SIGKILLED, **facts})["reason"][
        "kind"
    ]
    return found


@pytest.mark.parametrize("counted", [{}, {"programs": 1}])
def test_a_kill_that_was_another_processs_is_not_what_ended_the_server(
    group: Cgroup, tmp_path: Path, counted: dict[str, Any]
) -> None:
    """A moment after the server has said so, it is killed by hand."""
    evidence = begun(group)
    count_kills(tmp_path, 1)
    assert kind_of_child(evidence, oom_kills=[0, 1], **counted) == "oom_killed"
    assert kind_of_kill(evidence) == "signaled"


def test_another_kill_after_that_of_a_shard_is_the_servers_own(
    group: Cgroup, tmp_path: Path
) -> None:
    evidence = begun(group)
    count_kills(tmp_path, 2)
    kind_of_child(evidence, oom_kills=[0, 1])
    assert kind_of_kill(evidence) == "oom_killed"


@pytest.mark.parametrize("status", [0, 1 << 8, signal.SIGTERM, signal.SIGSEGV])
def test_an_exit_that_was_no_kill_takes_no_evidence_from_the_server(
    group: Cgroup, tmp_path: Path, status: int
) -> None:
    evidence = begun(group)
    count_kills(tmp_path, 1)
    assert kind_of_child(evidence, wait_status=status, oom_kills=[0, 0]) != "oom_killed"
    assert kind_of_kill(evidence) == "oom_killed"
