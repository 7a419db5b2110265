# SPDX-License-Identifier: Apache-2.0
"""A share of a rollout: taken as it finishes, to its end or to what has failed."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from openenvd.rollouts import share as shares
from openenvd.rollouts.episodes import Episode, FailureReason
from openenvd.rollouts.errors import PolicyNotFound
from openenvd.rollouts.run import RunConfig
from openenvd.rollouts.share import Share

from . import made
from .conftest import Serve, address_of

POLICY = """
import os
def go(observation): return {"what": os.environ["SHARE_SAYS_FOR_TEST"]}
"""


def share_of(
    addresses: list[str], tmp_path: Path, numbers: list[int], policy: str = "policy_of_share:go"
) -> Share:
    (tmp_path / "policy_of_share.py").write_text(POLICY)
    fields: dict[str, Any] = {"episodes": 20, "concurrency": 2, "retries": 0}
    config = RunConfig(
        environments={"walk": "http://127.0.0.1:1"}, policy=policy, folder=tmp_path, **fields
    )
    return Share(config, addresses, numbers, str(tmp_path), {"SHARE_SAYS_FOR_TEST": "go"})


async def all_of(share: Share) -> list[Episode]:
    found: list[Episode] = []
    has_ended = False
    while not has_ended:
        episodes, has_ended = await share.take()
        found += episodes
    return found


async def test_a_share_is_played_at_its_own_addresses_and_handed_over_with_all_steps(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARE_SAYS_FOR_TEST", "")
    addresses = [address_of(serve()), address_of(serve())]
    episodes = await all_of(share_of(addresses, tmp_path, [3, 8, 11]))
    assert sorted(each.id for each in episodes) == ["000003", "000008", "000011"]
    assert {each.id: addresses.index(each.environment) for each in episodes} == {
        "000003": 1,
        "000008": 0,
        "000011": 1,
    }
    assert [len(each.steps) for each in episodes] == [5, 5, 5]


async def test_episodes_of_an_address_where_nobody_answers_are_handed_over_as_failed(
    tmp_path: Path, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARE_SAYS_FOR_TEST", "")
    share = share_of([f"http://127.0.0.1:{unused_port}"], tmp_path, [0, 1])
    reasons = [each.failure and each.failure.reason for each in await all_of(share)]
    assert reasons == [FailureReason.NOT_CONNECTED] * 2


async def test_a_share_that_fails_says_so_when_it_is_taken(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARE_SAYS_FOR_TEST", "")
    share = share_of([address_of(serve())], tmp_path, [0], "policy_of_share:absent")
    with pytest.raises(PolicyNotFound):
        await all_of(share)


async def test_what_follows_without_a_pause_is_handed_over_before_all_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it waits for so long only."""
    monkeypatch.setattr(shares, "TAKE_SECONDS", 0.2)
    monkeypatch.setattr(shares, "GATHER_SECONDS", 5.0)
    share = share_of([], tmp_path, [])

    async def play() -> None:
        for number in itertools.count():
            await share._sink.finish(made.episode(f"{number:06d}"))
            await asyncio.sleep(0.01)

    monkeypatch.setattr(share, "_play", play)
    began = time.monotonic()
    episodes, has_ended = await share.take()
    assert time.monotonic() - began < 4.0
    assert episodes
    assert not has_ended
    assert share._playing
    share._playing.cancel()
