# SPDX-License-Identifier: Apache-2.0
"""How `upstream_envs` compares what two servers have answered."""

from __future__ import annotations

from .upstream_envs import Comparison


def test_values_that_upstream_itself_varies_are_compared_by_type() -> None:
    """An id that is a number here, and a key that is missing, are found all the same."""
    first = {"episode_id": "0f8fad5b-d9cb-469f-a165-70867728950e", "score": 1, "metadata": {}}
    second = {**first, "episode_id": "7c9e6679-7425-40de-944b-e07fc1f90ae7"}
    assert Comparison([first, second], {**first, "episode_id": "another"}).verdict == "yes"
    assert Comparison([first, second], {**first, "episode_id": 7}).verdict == "no"
    assert Comparison([first, second], {**first, "score": 2}).verdict == "no"
    assert Comparison([first, second], {"episode_id": "x", "score": 1}).verdict == "no"


def test_random_environments_are_compared_by_type() -> None:
    runs = [{"board": [0, 1], "done": False}, {"board": [1, 0], "done": False}]
    assert Comparison(runs, {"board": [1, 1], "done": True}).verdict == "by type"
    assert Comparison(runs, {"board": [1, 1], "done": 1}).verdict == "no"
    assert Comparison(runs, {"board": [1, 1], "done": True, "more": 1}).verdict == "no"
    assert Comparison(runs, {"board": [1, 1, 1], "done": True}).verdict == "by type"
