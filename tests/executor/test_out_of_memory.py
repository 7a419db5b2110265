# SPDX-License-Identifier: Apache-2.0
"""Kills for memory: by the kernel, in real cgroups; and by our watchdog, where there are none."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openenvd.executor.messages import LONG, SHORT, Died, Succeeded
from openenvd.executor.policy.memory import Timing, Usage, find_violation
from openenvd.executor.supervisor.memory import WorkerMemory
from openenvd.system.memory.cgroups import CgroupManager
from openenvd.system.process import oom_evidence
from openenvd.system.process.exit_reason import Certainty, Detector, ExitKind

from .executor_bench import Bench, make_plan

MB = 2**20


@pytest.fixture
def make_capped(make_bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """Starts executors whose workers may use 64 MB each."""
    manager = CgroupManager(f"test-{os.getpid()}")
    available, why_not = manager.available, manager.why_not
    manager.remove()
    if not available:
        pytest.skip(f"no cgroups: {why_not}")
    return partial(make_bench, make_plan(worker_bytes=64 * MB))


@pytest.fixture
def capped(make_capped: Callable[..., Bench]) -> Bench:
    return make_capped()


@pytest.mark.usefixtures("without_kernel_log")
@pytest.mark.parametrize("schedule", [LONG, SHORT])
def test_a_worker_over_its_cap_is_named_with_the_evidence(capped: Bench, schedule: str) -> None:
    neighbour = capped.submit("hang", schedule=schedule)
    capped.recorder.progress(neighbour)
    outcome = capped.run("grow", {"size": 200 * MB}, schedule=schedule)
    assert isinstance(outcome, Died)
    reason = outcome.exit
    assert (reason.kind, reason.detector) == (ExitKind.OOM_KILLED, Detector.CGROUP)
    assert reason.certainty is Certainty.CERTAIN
    assert reason.limit_bytes == 64 * MB
    assert reason.evidence is not None
    assert reason.evidence.endswith(f"{outcome.worker}, oom_kill 0→1")
    assert isinstance(capped.run("grow", {"size": MB}, schedule=schedule), Succeeded)
    assert not capped.recorder.of(Died, neighbour)


def test_a_grandchilds_kill_is_out_of_memory_and_explains_no_later_exit(capped: Bench) -> None:
    outcome = capped.run("grow_child", {"size": 200 * MB})
    assert isinstance(outcome, Died)
    assert outcome.exit.detector is Detector.CGROUP
    assert capped.run("grow", {"size": 200 * MB}).exit.is_oom
    assert not capped.run("die", {"how": "SIGKILL"}).exit.is_oom


@pytest.fixture
def without_kernel_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_evidence, "kernel_log_kills", lambda _since: [])


@pytest.fixture
def wait_for_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the kernel's counters have been read again."""
    looks = threading.Semaphore(0)

    def look(*args: Any) -> None:
        look_now(*args)
        looks.release()

    look_now = WorkerMemory.look_at_cgroups
    monkeypatch.setattr(WorkerMemory, "look_at_cgroups", look)

    def wait() -> None:
        while looks.acquire(blocking=False):  # those until now
            pass
        for _ in range(3):  # one may have begun before
            assert looks.acquire(timeout=30)

    return wait


@pytest.mark.usefixtures("without_kernel_log")
@pytest.mark.parametrize("schedule", [LONG, SHORT])
def test_a_kill_by_hand_long_after_a_grandchilds_is_not_out_of_memory(
    make_capped: Callable[..., Bench], wait_for_looks: Callable[[], None], schedule: str
) -> None:
    capped = make_capped(timing=Timing(cgroup_look=0.05))
    task_id = capped.submit("oom_grandchild_and_hang", {"size": 200 * MB}, schedule=schedule)
    pid = capped.recorder.progress(task_id)["pid"]
    wait_for_looks()
    os.kill(pid, signal.SIGKILL)
    outcome = capped.recorder.outcome(task_id)
    assert isinstance(outcome, Died)
    assert outcome.exit.kind is ExitKind.SIGNALED


@pytest.mark.usefixtures("without_kernel_log")
def test_an_error_long_after_a_grandchilds_kill_is_explained_by_the_kill(
    make_capped: Callable[..., Bench], wait_for_looks: Callable[[], None], tmp_path: Path
) -> None:
    capped = make_capped(timing=Timing(cgroup_look=0.05))
    payload = {"size": 200 * MB, "until": str(tmp_path / "then")}
    task_id = capped.submit("oom_grandchild_and_fail", payload)
    capped.recorder.progress(task_id)
    wait_for_looks()
    (tmp_path / "then").touch()
    outcome = capped.recorder.outcome(task_id)
    assert isinstance(outcome, Died)
    assert outcome.exit.is_oom


@pytest.mark.usefixtures("without_kernel_log")
@pytest.mark.parametrize("schedule", [LONG, SHORT])
def test_a_kill_right_after_a_grandchilds_is_only_probably_out_of_memory(
    capped: Bench, schedule: str
) -> None:
    task_id = capped.submit("oom_grandchild_and_hang", {"size": 200 * MB}, schedule=schedule)
    os.kill(capped.recorder.progress(task_id)["pid"], signal.SIGKILL)
    outcome = capped.recorder.outcome(task_id)
    assert isinstance(outcome, Died)
    assert outcome.exit.certainty is Certainty.PROBABLE
    assert "was probably killed" in outcome.exit.sentence()


def test_a_task_may_ask_for_a_cap_of_its_own_which_ends_with_it(capped: Bench) -> None:
    assert capped.run("grow", {"size": 40 * MB}, memory_bytes=16 * MB).exit.is_oom
    assert isinstance(capped.run("grow", {"size": MB}), Succeeded)
    outcome = capped.run("grow", {"size": 100 * MB}, memory_bytes=400 * MB)
    assert isinstance(outcome, Succeeded)
    assert (outcome.peak_bytes or 0) > 100 * MB
    assert capped.run("grow", {"size": 100 * MB}).exit.is_oom


@pytest.fixture
def watched(make_bench: Callable[..., Bench]) -> Bench:
    """An executor whose workers may use 64 MB each, and have no cgroups."""
    return make_bench(make_plan(worker_bytes=64 * MB), use_cgroups=False)


@pytest.mark.parametrize("schedule", [LONG, SHORT])
@pytest.mark.parametrize("operation", ["grow_and_hang", "grow_child_and_hang"])
def test_without_cgroups_a_watchdog_kills_a_worker_over_its_cap(
    watched: Bench, schedule: str, operation: str
) -> None:
    neighbour = watched.submit("hang", schedule=schedule)
    watched.recorder.progress(neighbour)
    outcome = watched.run(operation, {"size": 200 * MB}, schedule=schedule)
    assert isinstance(outcome, Died)
    reason = outcome.exit
    assert (reason.kind, reason.detector) == (ExitKind.OOM_KILLED, Detector.WATCHDOG)
    assert reason.certainty is Certainty.CERTAIN
    assert reason.limit_bytes == 64 * MB
    assert (reason.peak_bytes or 0) > 64 * MB
    assert reason.sentence().startswith("was ended by openenvd for memory at ")
    assert isinstance(watched.run("echo", schedule=schedule), Succeeded)
    assert not watched.recorder.of(Died, neighbour)


def test_the_watchdog_holds_a_task_to_its_cap_and_a_kill_by_hand_is_none(watched: Bench) -> None:
    task_id = watched.submit("grow_and_hang", {"size": 100 * MB}, memory_bytes=400 * MB)
    watched.recorder.progress(task_id)
    other = watched.run("grow_and_hang", {"size": 100 * MB})
    assert other.exit.detector is Detector.WATCHDOG
    assert not watched.recorder.of(Died, task_id)
    assert watched.run("die", {"how": "SIGKILL"}).exit.kind is ExitKind.SIGNALED


def usage(name: str, held_mb: int, limit_mb: int | None = 256) -> Usage:
    return Usage(name, held_mb * MB, None if limit_mb is None else limit_mb * MB)


@pytest.mark.parametrize(
    ("usages", "available_mb", "ended"),
    [
        ([], 0, None),
        ([usage("a", 200), usage("b", 100)], 1000, None),
        ([usage("a", 300), usage("b", 400)], 1000, "b"),  # the largest first
        ([usage("a", 500, None), usage("b", 300)], 1000, "b"),  # who has no cap exceeds none
        ([usage("a", 100), usage("b", 200)], 20, "b"),  # before the kernel picks at random
        ([usage("a", 10)], 20, None),  # which would help nobody
    ],
)
def test_which_worker_the_watchdog_kills(
    usages: list[Usage], available_mb: int, ended: str | None
) -> None:
    found = find_violation(usages, available_bytes=available_mb * MB, reserve_bytes=100 * MB)
    assert (None if found is None else found.name) == ended
