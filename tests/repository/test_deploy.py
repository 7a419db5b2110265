# SPDX-License-Identifier: Apache-2.0
"""What runs the daemon in a cluster gives it the rights that the engine asks for, and no more."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


def objects(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def test_a_daemon_in_a_cluster_has_the_role_of_the_documentation() -> None:
    account, role, binding, *_ = objects("deploy/openenvd.yaml")
    assert [account, role, binding] == objects("docs/openenvd-rbac.yaml")


def test_the_image_is_of_this_version_in_manifest_and_chart() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [chart], [values] = objects("deploy/chart/Chart.yaml"), objects("deploy/chart/values.yaml")
    [deployment] = [
        each for each in objects("deploy/openenvd.yaml") if each["kind"] == "Deployment"
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == values["image"] == f"openenvd:{version}"
    assert chart["version"] == chart["appVersion"] == version


def test_the_daemons_volume_outlives_its_release() -> None:
    """It has what the daemon knows of replicas that go on; chart and manifests say the same."""
    kept = "annotations: {helm.sh/resource-policy: keep}"
    for path in ("deploy/openenvd.yaml", "deploy/chart/templates/openenvd.yaml"):
        [claim] = [
            each for each in (ROOT / path).read_text().split("---\n") if "VolumeClaim\n" in each
        ]
        assert kept in claim
