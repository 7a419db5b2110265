# SPDX-License-Identifier: Apache-2.0
"""What a forked child writes to: pages of its own rather than those that it shares."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells whose pages are whose")

# Leaves free blocks between objects, then forks a child that allocates, and prints its own pages.
FORK_AND_ALLOCATE = """
import gc, os, sys
from openenvd.system.page_sharing import prepare_to_fork
from openenvd.system.proc import rollup_bytes

objects = [bytes(number % 900) for number in range(100_000)]
del objects[::7]
gc.disable()
if sys.argv[1] == "prepared":
    prepare_to_fork()
if (pid := os.fork()) == 0:
    before = rollup_bytes(os.getpid(), "Private_Dirty")
    own = [bytes(number % 900) for number in range(3000)]
    print(rollup_bytes(os.getpid(), "Private_Dirty") - before, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""

COUNT_TAKEN = """
from openenvd.system import page_sharing
page_sharing.prepare_to_fork()
print(sum(map(len, page_sharing._taken)))
"""


def result_of(script: str, *arguments: str, **variables: str) -> int:
    environ = {**os.environ, **variables}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_child_of_a_prepared_process_copies_fewer_pages() -> None:
    unprepared = result_of(FORK_AND_ALLOCATE, "unprepared")
    prepared = result_of(FORK_AND_ALLOCATE, "prepared")
    assert prepared < 0.7 * unprepared


def test_little_is_taken_of_an_allocator_that_is_not_known() -> None:
    assert result_of(COUNT_TAKEN, PYTHONMALLOC="malloc") < 100_000
