# SPDX-License-Identifier: Apache-2.0
"""What keeps a machine from its best, as it is judged from plain values."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from openenvd.environments.engines.base import Check
from openenvd.server.operations import machine

GIGABYTE = 2**30


@pytest.mark.parametrize(
    ("check", "words", "command"),
    [
        (machine.open_files(1024, 4096, 2), "1,536 sessions on 2 cores, and 4,096", "nofile"),
        (machine.cgroups("read-only", is_container=False), "read-only", "systemd-run"),
        (machine.cgroups("read-only", is_container=True), "read-only", "docker run"),
        (
            machine.kernel_log(PermissionError(1, "not permitted"), is_container=False),
            "not permitted",
            "sysctl kernel.dmesg_restrict=0",
        ),
        (
            machine.kernel_log(FileNotFoundError(2, "no such file"), is_container=True),
            "no such file",
            "--device /dev/kmsg",
        ),
        (machine.ports(3), "3 ports between 21000 and 24999", "ss -ltnp"),
        (machine.swap(4 * GIGABYTE, 8 * GIGABYTE), "4096 of 8192 MB in use", "swapoff"),
        (machine.disk(Path("/h"), 5 * 2**20), "5 MB are free in /h", "openenv prune"),
    ],
)
def test_what_is_missing_has_the_command_that_mends_it(
    check: Check, words: str, command: str
) -> None:
    assert words in (check.problem or "")
    assert command in (check.remedy or "")


@pytest.mark.parametrize(
    "check",
    [
        machine.open_files(resource.RLIM_INFINITY, 10**6, 1),
        machine.open_files(4096, 4096, 2),
        machine.cgroups("", is_container=True),
        machine.kernel_log(None, is_container=True),
        machine.ports(machine.FEW_PORTS),
        machine.swap(0, 0),
        machine.swap(GIGABYTE, 8 * GIGABYTE),
        machine.disk(Path("/h"), 2 * GIGABYTE),
    ],
)
def test_what_is_there_has_a_note_alone(check: Check) -> None:
    assert (check.problem, check.remedy) == (None, None)
    assert len(check.notes) == 1
