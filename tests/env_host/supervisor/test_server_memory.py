# SPDX-License-Identifier: Apache-2.0
"""Whose a kill for memory was that the kernel has counted: by events, files, and real processes."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openenvd.env_host.supervisor import memory
from openenvd.system.memory.cgroup_tree import V1, V2
from openenvd.system.memory.cgroups import Cgroup, CgroupManager
from openenvd.system.process.diagnose import of_cgroup
from openenvd.system.process.oom_evidence import kernel_log_kills, killed_process

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS

SIGKILLED = 9
PID = 4_194_304  # above what the kernel gives, so that its log has none
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


def killed_for_memory(
    kills: memory.KillCount, wait_status: int = SIGKILLED, *, start: int = 1
) -> bool:
    evidence = kills.evidence_of(PID, wait_status, start, time.monotonic())
    return bool(evidence)


@pytest.mark.parametrize("first", OTHER_EXITS)
def test_a_kill_is_of_one_exit_and_another_exit_leaves_it_to_its_victim(
    kills: memory.KillCount, tmp_path: Path, first: int
) -> None:
    assert not killed_for_memory(kills)  # it was before
    count_kills(tmp_path, 2)
    assert not killed_for_memory(kills, first)
    assert [killed_for_memory(kills) for _ in range(2)] == [True, False]


@pytest.mark.parametrize(("wait_status", "programs"), [(0, 2), (SIGKILLED, 1)])
def test_what_the_last_exit_in_a_group_does_not_explain_was_a_program(
    kills: memory.KillCount, tmp_path: Path, wait_status: int, programs: int
) -> None:
    count_kills(tmp_path, 3)
    killed_for_memory(kills, wait_status)
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
    limits = [kills.limit_bytes]
    (tmp_path / name).write_text(f"{300 << 20}\n")
    assert [*limits, kills.limit_bytes] == [None, 300 << 20]
    of_job = memory.KillCount(
        Cgroup(str(tmp_path / "task"), "task", version), limit_bytes=200 << 20
    )
    assert of_job.limit_bytes == 200 << 20
    (tmp_path / counter).write_text("oom_kill 2\n")
    evidence = kills.evidence_of(PID, SIGKILLED, 1, time.monotonic())
    assert evidence == {"oom_kills": [1, 2], "cgroup": "trial-0", "kernel_log_line": None}


EVENTS = ("start", "look", "program", "kernel", "hand", "other", "reap")


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3))), st.booleans())
def test_each_kill_is_told_once_and_of_no_process_that_was_started_after_it(
    events: list[tuple[str, int]], is_logged: bool
) -> None:
    """Kills by the kernel and by hand, and exits, in any order; some are reaped late.

    The kernel log has the truth. Without it, a kill by hand of a process that was there when a
    program was killed may be taken for that kill; the number of kills is right.
    """
    count, living, victims = 0, {0: 0}, {-1: 0}
    dead: dict[int, tuple[int, str]] = {}
    causes: Counter[str] = Counter()
    numbers, programs = [], 0
    ledger = memory.KillLedger(0)
    for event, which in [*events, *[("reap", 0)] * len(events)]:
        among = dead if event == "reap" else living
        pid = sorted(among)[which % len(among)] if among else None
        if event == "start":
            ledger.note(count)
            living[1 + max([*living, *dead, *victims])] = count
        elif event == "look" and not dead:  # otherwise, their kills are left to them
            ledger.note(count)
            programs += ledger.take_rest()
            victims = {victim: 0 for victim in victims if victim in living}
            victims[-1] = 0
        elif event == "program":
            count, causes = count + 1, causes + Counter(program=1)
            victims[1 + max([*living, *dead, *victims])] = count
        elif pid is not None and event in ("kernel", "hand", "other"):
            causes += Counter({event: 1})
            dead[pid] = (living.pop(pid), event)
            if event == "kernel":
                count += 1
                victims[pid] = count
        elif pid is not None and event == "reap":
            ledger.note(count)
            start, cause = dead.pop(pid)
            logged = [victim for victim in victims if victim >= 0] if is_logged else []
            number = None if cause == "other" else ledger.explain(pid, start, logged)
            if is_logged or not causes["hand"]:
                assert (number is not None) == (cause == "kernel")
            if number is not None:
                assert start < number <= count
                numbers.append(number)
                victims.pop(pid, None)
    ledger.note(count)
    assert len(set(numbers)) == len(numbers)
    assert (
        len(numbers) + programs + ledger.take_rest()
        == count
        == causes["kernel"] + causes["program"]
    )


EATERS = """
import os, subprocess, sys
from plain import Bare, Seen

EAT = "a = bytearray(300 << 20); a[::4096] = b'x' * len(a[::4096])"


class Eater(Bare):
    def step(self, action):
        if action.how == "child":
            subprocess.run([sys.executable, "-c", EAT], start_new_session=True)
        if action.how == "own":
            exec(EAT, {})
        if action.how == "kill":
            os.kill(os.getpid(), 9)
        if action.how == "exit":
            os._exit(3)
        return Seen()
"""
# The memory of a killed process stays in use while another process reads its `smaps_rollup`. The
# kernel then kills one more: this one, rather than a supervisor that is alone in its group. Its
# score lies between that of an eater and those of the others.
SPARE = """
import sys
a = b"x" * (20 << 20)
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("400")
print(flush=True)
sys.stdin.read()
"""
ORDERS = ("child", "own", "kill", "exit", "own", "child", "kill")


@pytest.mark.parametrize("isolate", [False, True])
def test_each_kill_in_a_cgroup_is_told_once_and_a_kill_by_hand_is_none(
    serve: StartHost, tmp_path: Path, cgroups: CgroupManager, isolate: bool
) -> None:
    """The kernel log has the truth: a small process may be killed, too, if memory is short."""
    group = cgroups.create("server", 150 << 20)
    python = tmp_path / "python"
    joins = f"echo $$ > {group.directory}/cgroup.procs"
    python.write_text(f'#!/bin/sh\n{joins}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    began = time.monotonic()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    named = {"python": str(python), "admission_timeout_seconds": WAIT_SECONDS}
    host = serve("eaters:Eater", files={"eaters.py": EATERS}, isolate=isolate, **named)
    for order in ORDERS:
        with subprocess.Popen([python, "-c", SPARE], **pipes) as spare:
            assert spare.stdout is not None
            assert spare.stdout.readline()
            with host.open() as client:
                client.ask("reset")
                client.send("step", {"how": order})
                client.receive()
    exits: list[Any] = []
    told = 0
    while len(exits) < len(ORDERS) - ORDERS.count("child") or told < group.oom_kills():
        exit_ = host.note_that_has("shard_exit")
        told += exit_.get("programs") or exit_["reason"]["kind"] == "oom_killed"
        exits += [] if exit_.get("programs") else [exit_]
    assert told == group.oom_kills() >= ORDERS.count("child") + ORDERS.count("own")
    lines = of_cgroup(kernel_log_kills(began), group.directory)
    victims = [killed[0] for line in lines if (killed := killed_process(line))]
    assert [one["reason"]["kind"] for one in exits if one["wait_status"] != SIGKILLED] == ["exited"]
    for one in exits if victims else ():  # it may be read
        if one["wait_status"] == SIGKILLED:
            kind = "oom_killed" if one["pid"] in victims else "signaled"
            assert (one["reason"]["kind"], one["reason"]["certainty"]) == (kind, "certain")
    assert host.stop() == 0
    group.remove()


def test_without_a_cgroup_the_machines_counter_is_told_and_proves_nothing() -> None:
    kills = memory.KillCount(None)
    assert not killed_for_memory(kills, start=kills.count())
