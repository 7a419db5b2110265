# SPDX-License-Identifier: Apache-2.0
"""While episodes run, garbage is looked for less often, and threads give way sooner; afterwards as
before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.interpreter import (
    SWITCH_SECONDS,
    THRESHOLDS,
    thresholds,
    while_episodes_run,
)

from .conftest import Serve, address_of

PYTHONS = (700, 10, 10)
PYTHONS_SWITCH_SECONDS = 0.005


@pytest.fixture(autouse=True)
def as_in_a_fresh_process() -> Iterator[None]:
    before = gc.get_threshold()
    switch_seconds = sys.getswitchinterval()
    gc.set_threshold(*PYTHONS)
    sys.setswitchinterval(PYTHONS_SWITCH_SECONDS)
    yield
    gc.set_threshold(*before)
    sys.setswitchinterval(switch_seconds)


async def test_settings_are_changed_only_while_episodes_run(serve: Serve) -> None:
    seen = set()

    async def policy(_observation: Any) -> dict[str, Any]:
        seen.add((gc.get_threshold(), round(sys.getswitchinterval(), 6)))
        return {"what": "go"}

    async for _ in RolloutCollector(address_of(serve()), policy).batches(2, episodes=4):
        pass
    assert seen == {(THRESHOLDS, SWITCH_SECONDS)}
    assert (gc.get_threshold(), sys.getswitchinterval()) == (PYTHONS, PYTHONS_SWITCH_SECONDS)


def test_the_last_of_several_restores_the_setting() -> None:
    with while_episodes_run():
        with while_episodes_run():
            pass
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == PYTHONS


def test_a_setting_that_others_change_meanwhile_is_kept() -> None:
    with while_episodes_run():
        gc.set_threshold(50_000, 5, 5)
        sys.setswitchinterval(0.001)
    assert (gc.get_threshold(), sys.getswitchinterval()) == ((50_000, 5, 5), 0.001)


def test_a_shorter_switch_interval_is_kept() -> None:
    sys.setswitchinterval(0.00005)
    with while_episodes_run():
        assert sys.getswitchinterval() == pytest.approx(0.00005)


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        (PYTHONS, THRESHOLDS),
        ((100_000, 50, 10), (100_000, 50, 100)),
        ((0, 10, 10), (0, 10, 10)),  # it is off
    ],
)
def test_the_garbage_collector_never_runs_more_often_than_before(
    before: tuple[int, int, int], meanwhile: tuple[int, int, int]
) -> None:
    assert thresholds(before) == meanwhile
