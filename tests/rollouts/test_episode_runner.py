# SPDX-License-Identifier: Apache-2.0
"""Steps take turns in the event loop; what is kept beside a step is one JSON object."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from openenvd.rollouts.episode_runner import StepTurns, _info


async def test_a_few_steps_are_taken_in_each_iteration_in_order() -> None:
    turns, passed, seen = StepTurns(3), list[int](), list[int]()

    async def one(number: int) -> None:
        await turns.take()
        passed.append(number)

    def look() -> None:
        seen.append(len(passed))
        if len(passed) < 12:
            asyncio.get_running_loop().call_soon(look)

    tasks = [asyncio.create_task(one(number)) for number in range(12)]
    look()
    await asyncio.gather(*tasks)
    assert passed == list(range(12))
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 3


def pairs(text: bytes) -> list[tuple[str, Any]]:
    """Names and values, in order: a name said twice is there twice."""
    found: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=list)
    return found


@pytest.mark.parametrize(
    ("policy", "environment", "both"),
    [
        (b"{}", b"{}", []),
        (b"{}", b"null", []),
        (b'{"p":1}', b"{}", [("p", 1)]),
        (b"{}", b"7", [("metadata", 7)]),
        (b'{"p":1}', b"7", [("p", 1), ("metadata", 7)]),
        (b'{"p":"metadata"}', b"7", [("p", "metadata"), ("metadata", 7)]),
        (b'{"p":[{"metadata":1}]}', b"7", [("p", [[("metadata", 1)]]), ("metadata", 7)]),
        (b'{"metadata":1}', b"7", [("metadata", 1), ("environment_metadata", 7)]),
        (b'{"metadata":1}', b"{}", [("metadata", 1)]),
    ],
)
def test_info_has_no_name_twice_and_loses_nothing(
    policy: bytes, environment: bytes, both: list[tuple[str, Any]]
) -> None:
    assert pairs(_info(policy, environment)) == both


def test_metadata_gets_a_free_name_where_the_policy_uses_its_names() -> None:
    taken = b'{"metadata":1,"environment_metadata":2}'
    assert dict(pairs(_info(taken, b"7")))["environment_environment_metadata"] == 7
