# SPDX-License-Identifier: Apache-2.0
"""Every way to die gets its right reason, harms no neighbour and leaves a fresh worker.

The cells are those of `load_tests/oom_matrix.py`, on real processes and in real cgroups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from load_tests.oom_matrix import Way

WAYS = [
    "kernel kills the worker",
    "kernel kills a grandchild",
    "watchdog",
    "MemoryError",
    "kill -9 by hand",
    "segmentation fault",
    "exit code",
    "hang past its time-out",
]


def way_named(name: str) -> Way:
    from load_tests.oom_matrix import WAYS as ALL

    return next(way for way in ALL if way.name == name)


def test_every_way_is_tried() -> None:
    from load_tests.oom_matrix import WAYS as ALL

    assert [way.name for way in ALL] == WAYS


@pytest.mark.parametrize("place", ["guaranteed", "burst"])
@pytest.mark.parametrize("schedule", ["LONG", "SHORT"])
@pytest.mark.parametrize("name", WAYS)
def test_an_exit_is_explained_and_leaves_other_workers_alone(
    name: str, schedule: str, place: str
) -> None:
    from load_tests.oom_matrix import run_cell, why_no_cgroups

    way = way_named(name)
    if way.needs_cgroups and (why_not := why_no_cgroups()):
        pytest.skip(f"no memory cgroups here: {why_not}")
    before = set(psutil.Process().children(recursive=True))
    cell = run_cell(way, schedule, place)
    assert cell.good, cell
    assert set(psutil.Process().children(recursive=True)) - before == set()
