# SPDX-License-Identifier: Apache-2.0
"""The time slice of a thread, asked of the real kernel."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from openenvd.system.scheduling import run_soon_after_waking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler")


def test_the_kernel_takes_the_slice_and_children_do_not_inherit_it() -> None:
    def in_thread() -> tuple[int, bool, int, int]:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        taken = run_soon_after_waking()
        pid = os.fork()
        if not pid:
            os._exit(int(os.sched_getscheduler(0) == os.SCHED_OTHER))
        return nice, taken, os.getpriority(os.PRIO_PROCESS, 0), os.waitpid(pid, 0)[1] >> 8

    with ThreadPoolExecutor(1) as pool:  # this process's own first thread stays as it is
        before, taken, after, child_is_normal = pool.submit(in_thread).result()
    assert taken
    assert after == before
    assert child_is_normal
