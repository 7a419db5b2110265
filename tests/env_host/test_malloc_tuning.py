# SPDX-License-Identifier: Apache-2.0
"""Large messages after the first take no new pages from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from openenvd.env_host.startup import malloc_tuning
{keep}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        first, second = b"x" * 2_000_000, b"y" * 2_000_000
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
malloc_tuning.give_back()
"""
FOR_A_WHILE = """
with malloc_tuning.kept_pages():
    pass
"""


def faults(keep: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep)],
        capture_output=True,
        check=True,
        env={"MALLOC_TRIM_THRESHOLD_": "65536"},  # as the daemon has it
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="elsewhere nothing is kept")
def test_pages_are_kept_between_large_messages() -> None:
    assert faults("malloc_tuning.keep_pages()") < 100 < faults("")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="elsewhere nothing is kept")
def test_afterwards_they_are_given_back_as_before() -> None:
    assert faults(FOR_A_WHILE) > 1000
