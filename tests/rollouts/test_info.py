# SPDX-License-Identifier: Apache-2.0
"""What is kept beside a step: the policy's words and the environment's, in one JSON object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openenvd.rollouts.episode_runner import _info


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
