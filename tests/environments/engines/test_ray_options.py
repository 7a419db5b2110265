# SPDX-License-Identifier: Apache-2.0
"""What a plan asks of Ray, and which cluster is meant: without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenvd.environments.engines.base import EngineRefused, Labels, ReplicaPlan
from openenvd.environments.engines.ray.options import (
    bundle,
    check_options,
    options_of,
    ray_address,
)


def plan(**fields: object) -> ReplicaPlan:
    labels = Labels("home", "sample", "sample-0-1", "1")
    known: dict[str, object] = {"labels": labels, "image": "", "host": "127.0.0.1", "port": 8000}
    return ReplicaPlan(**(known | fields))  # type: ignore[arg-type]


def test_a_replica_asks_for_one_cpu_by_default() -> None:
    assert bundle(plan()) == {"CPU": 1.0}


def test_limits_and_custom_resources_are_the_bundle() -> None:
    options = {"resources": '{"disk": 0.5}'}
    asked = plan(cpus=2.0, memory_bytes=1 << 30, gpus=2, options=options)
    assert bundle(asked) == {"CPU": 2.0, "memory": float(1 << 30), "GPU": 2, "disk": 0.5}


def test_a_share_of_a_gpu_stands_for_whole_ones() -> None:
    assert bundle(plan(gpus=1, options={"gpus": "0.25"}))["GPU"] == 0.25


def test_options_are_json_objects() -> None:
    options = {"runtime-env": '{"pip": ["numpy"]}', "label-selector": '{"zone": "a"}'}
    check_options(options, sandbox=False)
    found = {"runtime-env": {"pip": ["numpy"]}, "label-selector": {"zone": "a"}}
    assert options_of(options) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources": "disk"}, "must be a JSON object"),
        ({"resources": '{"CPU": 1}'}, "is not a custom resource"),
        ({"resources": '{"disk": true}'}, "must be a number above 0"),
        ({"runtime-env": "[]"}, "must be a JSON object"),
        ({"gpus": "many"}, "must be a number"),
        ({"gpus": "nan"}, "must be a number"),
        ({"address": "head:6399"}, "named by a variable"),
        ({"shm-size": "1g"}, "ray has no option 'shm-size'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, str], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        check_options(options, sandbox=False)


def test_a_sandbox_is_refused() -> None:
    with pytest.raises(EngineRefused, match="no sandbox"):
        check_options({}, sandbox=True)


def test_the_cluster_is_the_one_that_the_variable_names() -> None:
    environ = {"RAY_ADDRESS": "head:6399", "RAY_AUTH_MODE": "token", "RAY_LOG": "x"}
    assert ray_address(environ) == {"RAY_ADDRESS": "head:6399", "RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize("named", [{}, {"RAY_ADDRESS": "auto"}])
def test_else_it_is_the_one_that_runs_here(tmp_path: Path, named: dict[str, str]) -> None:
    environ = {"RAY_TMPDIR": str(tmp_path), **named}
    assert ray_address(environ) == {"RAY_ADDRESS": ""}
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6399")
    assert ray_address(environ) == {"RAY_ADDRESS": "127.0.0.1:6399"}


def test_an_address_leads_to_itself() -> None:
    found = ray_address({"RAY_ADDRESS": "head:6399"})
    assert ray_address(found) == found
