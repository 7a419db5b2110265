# SPDX-License-Identifier: Apache-2.0
"""The table of deaths: what is known, and what is made of it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from openenvd.system.process.diagnose import Evidence, diagnose_exit, of_cgroup, telling_line
from openenvd.system.process.exit_reason import Certainty, Detector, ExitKind, ExitReason
from openenvd.system.process.oom_evidence import OomCounters, kernel_log_kills, killed_process

PID = 41233
KILLED = int(signal.SIGKILL)
SEGFAULT = int(signal.SIGSEGV) | 0x80  # with a core dumped
STOOD_STILL: dict[str, Any] = {"before": OomCounters(2), "after": OomCounters(2)}
MOVED: dict[str, Any] = {"before": OomCounters(0), "after": OomCounters(1)}
MACHINE_MOVED: dict[str, Any] = {"before": OomCounters(None, 7), "after": OomCounters(None, 8)}
MACHINE_ALONE_MOVED: dict[str, Any] = {"before": OomCounters(2, 7), "after": OomCounters(2, 8)}
ITSELF: dict[str, Any] = {
    "kernel_log_line": f"Memory cgroup out of memory: Killed process {PID} (python) total-vm:1kB"
}
ANOTHER: dict[str, Any] = {
    "kernel_log_line": "Memory cgroup out of memory: Killed process 99 (uv (x)), UID 0 total-vm:1kB"
}
OURS = "Memory cgroup out of memory: Killed process 99 (cc1), UID 0; in cgroup /openenvd/e-1/long-1"
THEIRS = (
    "Memory cgroup out of memory: Killed process 98 (cc1), UID 0; in cgroup /openenvd/e-2/long-1"
)
OOM, CGROUP = ExitKind.OOM_KILLED, Detector.CGROUP
COUNTED = "(cgroup ?, oom_kill 0→1)"
BELOW = "(a process below it was killed: cgroup ?, oom_kill 0→1)"


def _exited(code: int) -> int:
    return code << 8


@pytest.mark.parametrize(
    ("wait_status", "known", "kind", "detector", "certainty"),
    [
        # Without any sign of memory
        (_exited(0), {}, ExitKind.EXITED, None, "certain"),
        (_exited(7), {}, ExitKind.EXITED, None, "certain"),
        (SEGFAULT, {}, ExitKind.SIGNALED, None, "certain"),
        (KILLED, {}, ExitKind.SIGNALED, None, "certain"),
        (None, {}, ExitKind.LOST, None, "certain"),
        # By hand, while the machine ran out elsewhere: the own counter rules memory out
        (KILLED, STOOD_STILL, ExitKind.SIGNALED, None, "certain"),
        (KILLED, MACHINE_ALONE_MOVED, ExitKind.SIGNALED, None, "certain"),
        # 1. the cgroup's counter
        (KILLED, MOVED, OOM, CGROUP, "certain"),
        (KILLED, MOVED | ITSELF, OOM, CGROUP, "certain"),
        (KILLED, MOVED | {"was_alone": False}, OOM, CGROUP, "probable"),
        (KILLED, MOVED | ITSELF | {"was_alone": False}, OOM, CGROUP, "certain"),
        # … which another process of the group moved
        (KILLED, MOVED | ANOTHER, ExitKind.SIGNALED, None, "certain"),
        (_exited(1), MOVED, OOM, CGROUP, "probable"),
        (_exited(1), MOVED | ANOTHER, OOM, CGROUP, "probable"),
        (_exited(0), MOVED, ExitKind.EXITED, None, "certain"),
        (SEGFAULT, MOVED, ExitKind.SIGNALED, None, "certain"),
        (None, MOVED, OOM, CGROUP, "probable"),
        # 2. the kernel log
        (KILLED, ITSELF, OOM, Detector.KERNEL_LOG, "certain"),
        (_exited(1), ITSELF, ExitKind.EXITED, None, "certain"),
        # 3. our watchdog
        (KILLED, {"watchdog": "512 of 256 MB"}, OOM, Detector.WATCHDOG, "certain"),
        # 4. the machine's counter, when there is no better one
        (KILLED, MACHINE_MOVED, OOM, Detector.VMSTAT, "probable"),
        (KILLED, MACHINE_MOVED | ANOTHER, ExitKind.SIGNALED, None, "certain"),
        (_exited(1), MACHINE_MOVED, ExitKind.EXITED, None, "certain"),
        # 5. `MemoryError`
        (_exited(1), {"memory_error": True}, OOM, Detector.MEMORY_ERROR, "certain"),
        # What we did ourselves
        (KILLED, {"stopped_by_us": True} | MACHINE_MOVED, ExitKind.STOPPED, None, "certain"),
        (_exited(0), {"stopped_by_us": True}, ExitKind.STOPPED, None, "certain"),
        (KILLED, {"timed_out": True}, ExitKind.TIMED_OUT, None, "certain"),
    ],
)
def test_table_of_exits(
    wait_status: int | None,
    known: dict[str, Any],
    kind: ExitKind,
    detector: Detector | None,
    certainty: str,
) -> None:
    reason = diagnose_exit(Evidence(PID, wait_status, **known))
    assert (reason.kind, reason.detector, reason.certainty) == (kind, detector, certainty)


def test_evidence_names_the_cgroup_its_counter_and_a_killed_descendant() -> None:
    reason = diagnose_exit(Evidence(PID, KILLED, cgroup_name="openenvd/long-3", **MOVED))
    assert reason.evidence == "cgroup openenvd/long-3, oom_kill 0→1"
    reason = diagnose_exit(
        Evidence(PID, _exited(1), cgroup_name="openenvd/long-3", **MOVED, **ANOTHER)
    )
    assert (reason.victim_pid, reason.victim_name) == (99, "uv (x)")
    assert (reason.evidence or "").startswith("uv (x) (pid 99) was killed: cgroup")
    found = diagnose_exit(Evidence(PID, _exited(1), kernel_log_line=OURS, **MOVED))
    assert (found.kind, found.certainty) == (ExitKind.OOM_KILLED, Certainty.CERTAIN)
    assert (found.victim_pid, found.victim_name) == (99, "cc1")


@pytest.mark.parametrize(
    ("wait_status", "known", "sentence"),
    [
        (
            KILLED,
            MOVED | {"peak_bytes": 251 << 20, "limit_bytes": 256 << 20},
            f"was killed by the kernel for memory at 251 MB; its limit was 256 MB {COUNTED}",
        ),
        (
            KILLED,
            MOVED,
            f"was killed by the kernel for using too much memory {COUNTED}",
        ),
        (KILLED, {}, "was killed by SIGKILL"),
        (_exited(1), {"memory_error": True}, "ran out of memory (MemoryError)"),
        (_exited(1), MOVED, f"exited with code 1 after running out of memory {BELOW}"),
        (None, MOVED, f"ran out of memory {BELOW}"),
        (
            KILLED,
            {"watchdog": "the watchdog's word", "peak_bytes": 251 << 20},
            "was ended by openenvd for memory at 251 MB (the watchdog's word)",
        ),
        (_exited(7), {}, "exited with code 7"),
        (None, {}, "disappeared while it was not watched"),
    ],
)
def test_sentence_contains_what_is_known(
    wait_status: int | None, known: dict[str, Any], sentence: str
) -> None:
    assert diagnose_exit(Evidence(PID, wait_status, **known)).sentence() == sentence


def test_reason_survives_json_and_that_of_a_failed_start_is_in_the_sentence() -> None:
    reason = diagnose_exit(Evidence(PID, KILLED, limit_bytes=5, peak_bytes=4, seconds=1.5, **MOVED))
    assert ExitReason.from_json(reason.to_json()) == reason
    why = "cannot start: Address already in use: 127.0.0.1:21000"
    found = {"kind": "exited", "pid": 0, "exit_code": 127, "evidence": why}
    assert ExitReason.from_json(found).sentence() == why


def test_log_lines_have_odd_names_and_those_of_the_process_and_its_cgroup_count() -> None:
    assert killed_process(ANOTHER["kernel_log_line"]) == (99, "uv (x)")
    assert killed_process("python invoked oom-killer: gfp_mask=0xcc0") is None
    lines = [ITSELF["kernel_log_line"], ANOTHER["kernel_log_line"]]
    assert telling_line(lines, PID) == lines[0]
    assert telling_line(lines, 5) == lines[1]
    assert telling_line([], 5) is None
    lines = [THEIRS, OURS, ANOTHER["kernel_log_line"]]
    assert of_cgroup(lines, "/sys/fs/cgroup/memory/openenvd/e-1/long-1") == lines[1:]
    assert of_cgroup(lines, None) == lines


def test_the_kernel_log_is_read_although_its_clock_is_behind_ours() -> None:
    """A line that is written after a moment is found from that moment on, and not much later."""
    kmsg = Path("/dev/kmsg")
    if not os.access(kmsg, os.R_OK | os.W_OK):
        pytest.skip("/dev/kmsg cannot be read and written here")
    pid = os.getpid()
    kmsg.write_text(f"<6>oom-kill:task_memcg=/a-test-of-openenvd,task=test,pid={pid},uid=0\n")
    before = time.monotonic()
    kmsg.write_text(f"<6>a test of openenvd: Killed process {pid} (test) total-vm:1kB\n")
    written = f"a test of openenvd: Killed process {pid} (test) total-vm:1kB"
    found = kernel_log_kills(before)
    if not found and not kernel_log_kills(0.0):
        pytest.skip("the kernel log has other pids here")
    assert any(line.startswith(written) for line in found)
    assert not any(line.startswith(written) for line in kernel_log_kills(before + 5))
