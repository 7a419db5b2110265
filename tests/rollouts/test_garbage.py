# SPDX-License-Identifier: Apache-2.0
"""While episodes run, the garbage collector looks less often; afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.garbage import THRESHOLDS, less_often, thresholds

from .conftest import Serve, address_of

PYTHONS = (700, 10, 10)


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS)
    yield
    gc.set_threshold(*before)


async def test_while_episodes_run_and_no_longer(serve: Serve) -> None:
    seen = set()

    async def policy(_observation: Any) -> dict[str, Any]:
        seen.add(gc.get_threshold())
        return {"what": "go"}

    async for _ in RolloutCollector(address_of(serve()), policy).batches(2, episodes=4):
        pass
    assert seen == {THRESHOLDS}
    assert gc.get_threshold() == PYTHONS


def test_the_last_of_several_puts_it_back() -> None:
    with less_often():
        with less_often():
            pass
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == PYTHONS


def test_what_somebody_else_has_set_meanwhile_stays() -> None:
    with less_often():
        gc.set_threshold(50_000, 5, 5)
    assert gc.get_threshold() == (50_000, 5, 5)


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        (PYTHONS, THRESHOLDS),
        ((100_000, 50, 10), (100_000, 50, 100)),
        ((0, 10, 10), (0, 10, 10)),  # it is off
    ],
)
def test_it_never_looks_more_often_than_before(
    before: tuple[int, int, int], meanwhile: tuple[int, int, int]
) -> None:
    assert thresholds(before) == meanwhile
