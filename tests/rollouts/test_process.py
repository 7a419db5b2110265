# SPDX-License-Identifier: Apache-2.0
"""What a rollout takes of its process: room for descriptors, and the C library's heap."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.rollouts.session_pool import reserve_descriptors


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def table_size() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("FDSize:")]
    return int(line.split()[1])


def test_reserving_descriptors_leaves_none_open() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    reserve_descriptors(3000)
    assert table_size() >= 3000
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1  # that of the folder itself


def test_a_lower_descriptor_limit_is_no_error() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    reserve_descriptors(100_000)


FAULTS = """
import resource
from openenvd.rollouts.session.loop_thread import reusing_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        bytes([1]) * 1_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with reusing_freed_memory():
    print(faults())
print(faults())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="the heap is GNU's"
)
def test_freed_memory_is_used_again_while_a_rollout_runs_and_given_back_afterwards() -> None:
    worker = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=worker, check=True, capture_output=True
    )
    during, afterwards = map(int, done.stdout.split())
    assert during < 2_000 < 20_000 < afterwards
