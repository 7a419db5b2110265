# SPDX-License-Identifier: Apache-2.0
"""What a shim keeps of the kernel's counters until a server that was killed is reaped."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from openenvd.shim.server_exit import DYING_SECONDS, ExitEvidence
from openenvd.system.cgroup_tree import V2
from openenvd.system.cgroups import Cgroup

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


def kind_of_shard(evidence: ExitEvidence, wait_status: int) -> str:
    facts = {"pid": PID, "wait_status": wait_status, "seconds": 9.0, "peak_bytes": None}
    found: str = evidence.explain_shard(facts)["reason"]["kind"]
    return found


@pytest.mark.parametrize("first", [0, 1 << 8, signal.SIGTERM, signal.SIGSEGV])
def test_another_shards_exit_takes_no_evidence_from_one_that_was_killed(
    group: Cgroup, tmp_path: Path, first: int
) -> None:
    """The kernel takes a while to end its victim: others' exits are reported before it."""
    evidence = begun(group)
    count_kills(tmp_path, 1)
    kind_of_shard(evidence, first)
    evidence.look()
    assert kind_of_shard(evidence, SIGKILLED) == "oom_killed"
    assert kind_of_shard(evidence, SIGKILLED) == "signaled"


def test_each_of_two_shards_killed_together_was_killed_for_memory(
    group: Cgroup, tmp_path: Path
) -> None:
    evidence = begun(group)
    count_kills(tmp_path, 2)
    kinds = [kind_of_shard(evidence, SIGKILLED) for _ in range(3)]
    assert kinds == ["oom_killed", "oom_killed", "signaled"]


def test_a_shards_exit_keeps_no_kill_from_being_forgotten(
    group: Cgroup, tmp_path: Path, clock: list[float]
) -> None:
    evidence = begun(group)
    count_kills(tmp_path, 1)
    evidence.look()
    clock[0] += DYING_SECONDS / 2
    kind_of_shard(evidence, 1 << 8)
    clock[0] += DYING_SECONDS / 2
    evidence.look()
    assert kind_of_shard(evidence, SIGKILLED) == "signaled"
