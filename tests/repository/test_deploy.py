# SPDX-License-Identifier: Apache-2.0
"""What runs the daemon in a cluster gives it the rights that the engine asks for, and no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from openenvd import __version__

ROOT = Path(__file__).resolve().parents[2]


def objects(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def chart() -> list[str]:
    """The templates of the chart's objects, of a release that is called as the project is."""
    text = (ROOT / "docs/deploy/chart/templates/openenvd.yaml").read_text()
    return text.replace("{{ $name }}", "openenvd").split("-}}\n")[-1].split("---\n")


def test_a_daemon_in_a_cluster_has_the_role_of_the_documentation() -> None:
    account, role, binding = map(yaml.safe_load, chart()[:3])
    assert [account, role, binding] == objects("docs/openenvd-rbac.yaml")


def test_chart_and_pages_name_this_version() -> None:
    [about] = objects("docs/deploy/chart/Chart.yaml")
    assert about["version"] == about["appVersion"] == __version__
    image = re.compile(r"openenvd:(\d+\.[\w.]+)")
    for path in (
        "docs/deploy/chart/values.yaml",
        "docs/deploy/Dockerfile",
        "docs/how-to/kubernetes.md",
    ):
        assert set(image.findall((ROOT / path).read_text())) == {__version__}, path


def test_the_newest_release_in_the_changelog_is_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(\d[^]]*)\] - ", changes, re.MULTILINE)[:1] == [__version__]


def test_the_daemons_volume_outlives_its_release() -> None:
    """It has what the daemon knows of replicas that go on."""
    [claim] = [each for each in chart() if "VolumeClaim\n" in each]
    assert "annotations: {helm.sh/resource-policy: keep}" in claim
