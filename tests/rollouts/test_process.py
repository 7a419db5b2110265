# SPDX-License-Identifier: Apache-2.0
"""What a rollout takes of its process: room for descriptors."""

import resource
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


def test_reserving_descriptors_leaves_none_open_and_a_lower_limit_is_no_error() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    reserve_descriptors(3000)
    assert table_size() >= 3000
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 1  # that of the folder itself
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    reserve_descriptors(100_000)
