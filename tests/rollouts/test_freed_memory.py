# SPDX-License-Identifier: Apache-2.0
"""The C library's heap while a rollout runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
