# SPDX-License-Identifier: Apache-2.0
"""Environments that want a token: every operation that talks to them sends it, none tells it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.access import ask, base_url_by_name
from openenvd.schema.errors import NotAnswering
from openenvd.schema.layout import Layout
from openenvd.schema.spec import EnvironmentSpec
from openenvd.system.net.access import without_token

from .conftest import Run


def test_operations_send_the_token_and_do_not_tell_it(
    run: Run, layout: Layout, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []
    launched = run("launch", source="echo", token="auto", progress=told.append)["environment"]
    assert launched["has_token"]
    [replica] = run_files.all_of(layout.runs)
    token = replica.token
    assert token is not None
    base_url = base_url_by_name(layout.runs, "echo")
    assert without_token(base_url) == (launched["address"], token)
    with pytest.raises(NotAnswering, match="401"):
        ask(launched["address"], "/health", 10.0)
    measured = {"action": {"message": "x"}, "requests_grid": [4], "repetitions": 1}
    results = [
        run("probe", name="echo"),
        run("describe", name="echo"),
        run("benchmark", name="echo", **measured),
        run("rollout", name="echo", out=str(tmp_path / "a"), episodes=2, max_steps=2),
        run("rollout", name=base_url, out=str(tmp_path / "b"), episodes=2, max_steps=2),
    ]
    assert [result["steps"] for result in results[3:]] == [4, 4]
    assert token not in json.dumps([launched, results, told])
    assert token not in "".join(capfd.readouterr())
    for path in (*layout.home.rglob("*"), *tmp_path.rglob("*")):
        if path.is_file() and token.encode() in path.read_bytes():
            assert path.name == "replica.json", path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_check_tells_of_environments_that_others_can_reach(run: Run, layout: Layout) -> None:
    run("launch", source="echo")
    assert run("check")["exposed"] == {}
    [replica] = run_files.all_of(layout.runs)
    path = replica.run_dir / "replica.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "host": "0.0.0.0"}))  # as if it did
    assert run("check")["exposed"] == {"echo": "0.0.0.0"}
    path.write_text(before)


@pytest.mark.parametrize(
    ("options", "has_token"),
    [
        ({}, False),
        ({"token": "auto"}, True),
        ({"host": "127.0.0.2"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "my-box"}, True),
    ],
)
def test_beyond_loopback_there_is_always_a_token(options: dict[str, Any], has_token: bool) -> None:
    spec = EnvironmentSpec("x", "echo", **options).with_access()
    assert (spec.token is not None) is has_token
    assert spec.token != "auto"


def test_a_given_token_is_kept() -> None:
    spec = EnvironmentSpec("x", "echo", host="0.0.0.0", token="mine" * 4)
    assert spec.with_access().token == "mine" * 4
