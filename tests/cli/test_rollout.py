# SPDX-License-Identifier: Apache-2.0
"""`openenv rollout`: what is sent, and what is told of the result."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from openenvd.cli.rollout import _payload, _summary

from ..client.fake_daemon import FakeDaemon
from .conftest import Command

NOTHING = {
    "policy": None, "variables": (), "episodes": None, "concurrency": None, "max_steps": None,
    "step_timeout": None, "episode_timeout": None, "retries": None, "seed": None, "form": None,
    "keep_failed": False, "buffer": None, "memory": None, "max_loop_lag": None, "out": "out",
}  # fmt: skip


def test_only_what_was_said_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert _payload(("echo",), NOTHING) == {"name": "echo", "out": f"{here}/out", "cwd": here}
    said = {**NOTHING, "episodes": 8, "seed": 0, "retries": 0, "out": "/elsewhere"}
    assert _payload(("echo", "http://h:1"), said) == {
        "name": "echo",
        "more_names": ["http://h:1"],
        "out": "/elsewhere",
        "cwd": here,
        "episodes": 8,
        "seed": 0,
        "retries": 0,
    }


def test_a_misspelled_environment_is_told_before_anything_is_queued(
    command: Command, fake: FakeDaemon
) -> None:
    error = {"kind": "not_found", "message": "no environment is called 'ecko'",
             "hint": "did you mean echo?", "near": ["echo"]}  # fmt: skip
    fake.get("/v1/environments/ecko", (404, {"error": error}))
    answer = command("rollout", "http://127.0.0.1:1", "ecko", "--out", "out")
    assert answer.code == 4
    assert "did you mean echo?" in answer.err
    assert "POST" not in {method for method, *_ in fake.calls}


def test_a_model_gets_its_key_and_no_other_policy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    chat = _payload(("echo",), {**NOTHING, "policy": "openai:http://h/v1"})
    assert chat["env"] == {"OPENAI_API_KEY": "k"}
    assert "env" not in _payload(("echo",), {**NOTHING, "policy": "random"})


def test_the_summary_tells_what_there_is_and_what_failed() -> None:
    result = {
        "wanted": 10, "earlier": 3, "done": 4, "truncated": 1, "out": "/out", "steps": 1200,
        "seconds": 2.0, "steps_per_second": 600.0, "mean_reward": 0.5,
        "failures": {"step_timed_out": 2},
        "lag": {"p99_seconds": 0.001, "worst_seconds": 0.25},
    }  # fmt: skip
    text = click.unstyle("\n".join(_summary(result)))
    for told in (
        "! 8 of 10 episodes are in /out",
        "the same command again plays what is missing",
        "1,200 steps in 2.0 s (600 steps/s)",
        "mean reward 0.5",
        "2 failed: step timed out",
        "loop lag p99 1.0 ms, worst 250.0 ms",
    ):
        assert told in text


def test_the_summary_of_all_of_it_is_a_success() -> None:
    result = {
        "wanted": 8, "earlier": 8, "done": 0, "truncated": 0, "out": "/out", "steps": 0,
        "mean_reward": None, "failures": {},
        "lag": {"p99_seconds": 0.0, "worst_seconds": 0.0},
    }  # fmt: skip
    first, *rest = _summary(result)
    assert click.unstyle(first) == "✓ 8 of 8 episodes are in /out"
    assert not any("missing" in line for line in rest)


def test_one_episode_of_one_step_is_told_as_one() -> None:
    result = {
        "wanted": 1, "earlier": 0, "done": 1, "truncated": 0, "out": "/out", "steps": 1,
        "seconds": 0.5, "steps_per_second": 2.0, "mean_reward": None, "failures": {},
        "lag": {"p99_seconds": 0.0, "worst_seconds": 0.0},
    }  # fmt: skip
    first, second, *_ = _summary(result)
    assert click.unstyle(first) == "✓ 1 of 1 episode is in /out"
    assert second == "  1 step in 0.5 s (2 steps/s)"
