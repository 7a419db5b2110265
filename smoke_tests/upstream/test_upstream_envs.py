# SPDX-License-Identifier: Apache-2.0
"""How `upstream_envs` compares what two servers have answered."""

from __future__ import annotations

from pathlib import Path

from .upstream_envs import Comparison, cause_of, with_own_path


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


def test_a_path_through_the_link_of_an_env_host_is_that_of_the_project() -> None:
    through_link = 'File "/home/run/coding-env-0-12ab/imports/coding_env/server/app.py", line 1'
    told = with_own_path(through_link, Path("/home"), Path("/src/envs/coding_env"))
    assert told == 'File "/src/envs/coding_env/server/app.py", line 1'


def test_a_difference_late_in_a_text_is_shown() -> None:
    [found] = Comparison(["a" * 500 + "one", "a" * 500 + "one"], "a" * 500 + "two").differences
    assert 'aone" upstream' in found
    assert 'atwo" ours' in found


def test_ours_may_say_why_a_session_cannot_begin() -> None:
    theirs = "Environment factory 'make' failed to create instance."
    assert Comparison([theirs, theirs], "make could not be created: OSError: none").is_equal
    assert not Comparison([theirs, theirs], "make takes no arguments").is_equal


def test_the_cause_of_a_failed_launch_is_the_line_below_its_name() -> None:
    sentence = (
        "resolved\n✗ launch carla-env  FAILED\n  No module named 'rubrics'\n  Log: openenv logs"
    )
    assert cause_of(sentence) == "No module named 'rubrics'"
    assert cause_of("Resolved\nerror: no such package\nhint: none") == "no such package"
    assert cause_of("error: no solution\n cause: gone\n✗ launch p  FAILED\n  uv failed") == "gone"
    assert cause_of("") == "it does not launch"
