# SPDX-License-Identifier: Apache-2.0
"""What is measured, and by how many generators."""

from __future__ import annotations

import pytest

from openenvd.rollouts.bench.sweep import Plan, crew_size


def test_every_cell_is_visited_once() -> None:
    plan = Plan((1, 2), (0.0, 1.0), repetitions=3)
    cells = list(plan.cells())
    assert len(cells) == len(set(cells)) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("largest", "cores", "files", "size"),
    [
        (1, 64, 20_000, 1),
        (512, 1, 20_000, 1),
        (512, 2, 20_000, 2),
        (16_384, 4, 20_000, 2),
        (16_384, 2, 1_024, 18),  # as many as it takes to have all sockets open
        (100_000, 4, 20_000, 6),
    ],
)
def test_generators_are_as_many_as_cores_and_files_ask_for(
    largest: int, cores: int, files: int, size: int
) -> None:
    assert crew_size(largest, cores, files) == size
