# SPDX-License-Identifier: Apache-2.0
"""What is built and deployed is what is there: packages, licence headers, the chart."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import yaml

import openenvd
import openenvd.envs
from openenvd import __version__

from .house import OUTSIDE, copy_files, files

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _package_folders() -> set[Path]:
    found = {path.parent for path in files() if path.name == "__init__.py"}
    return {path for path in found if not path.parts or path.parts[0] not in OUTSIDE}


def test_every_package_data_file_engine_and_room_is_built_or_linked() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {".".join(("openenvd", *path.parts)) for path in _package_folders()}
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for manifest in (ROOT / "env_host" / "bundled").glob("*/openenv.yaml"):
        assert "openenv.yaml" in data[f"openenvd.env_host.bundled.{manifest.parent.name}"]
    folders = {path.parent.name for path in (ROOT / "environments" / "engines").glob("*/engine.py")}
    points = PROJECT["project"]["entry-points"]["openenvd.engines"]
    assert points.keys() == folders
    for name, value in points.items():
        entry = EntryPoint(name, value, "openenvd.engines").load()
        assert entry.location.startswith(f"openenvd.environments.engines.{name}.engine:")
    rooms = {path.parts[0] for path in _package_folders() if path.parts}
    linked = {path.name for path in (ROOT / ".types" / "openenvd").iterdir() if path.is_dir()}
    assert linked == rooms


def build(what: str, folder: Path) -> None:
    """Build a wheel or a source distribution, as pip does, from what is in a checkout."""
    script = f"import sys; from setuptools import build_meta as b; b.build_{what}(sys.argv[1])"
    command = [sys.executable, "-c", script, str(folder)]
    subprocess.run(command, cwd=folder / "clone", check=True, capture_output=True)


def test_the_modules_of_the_tree_and_no_others_are_built(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    copy_files(clone)
    stale = clone / "build" / "lib" / "openenvd" / "server" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    build("wheel", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    pages = [p for p in (ROOT / "server/dashboard/static").rglob("*") if p.is_file()]
    assert {f"openenvd/{page.relative_to(ROOT)}" for page in pages} <= {*names}
    built = {name for name in names if name.endswith(".py")}
    modules = {path for folder in _package_folders() for path in (ROOT / folder).glob("*.py")}
    modules.remove(ROOT / "setup.py")
    assert built == {f"openenvd/{path.relative_to(ROOT)}" for path in modules}


def test_the_source_distribution_has_what_the_pages_say_is_there(tmp_path: Path) -> None:
    """An image's file, manifests and chart; an account for Kubernetes: no wheel has them."""
    copy_files(tmp_path / "clone")
    build("sdist", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        found = {name.partition("/")[2] for name in packed.getnames()}
    deployed = {str(p.relative_to(ROOT)) for p in (ROOT / "docs/deploy").rglob("*") if p.is_file()}
    assert deployed
    assert {*deployed, "docs/openenvd-rbac.yaml"} <= found


def test_a_module_of_a_user_imports_the_base_classes_by_either_name() -> None:
    for name in openenvd.envs.__all__:
        assert getattr(openenvd.envs, name) is getattr(openenvd, name)


def test_every_module_carries_the_licence() -> None:
    modules = [path for path in files() if path.suffix == ".py"]
    assert modules
    assert [path for path in modules if not _is_licensed(ROOT / path)] == []


def _is_licensed(path: Path) -> bool:
    return path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


# What runs the daemon in a cluster


def objects(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def chart() -> list[str]:
    """The templates of the chart's objects, of a release that is called as the project is."""
    text = (ROOT / "docs/deploy/chart/templates/openenvd.yaml").read_text()
    return text.replace("{{ $name }}", "openenvd").split("-}}\n")[-1].split("---\n")


def test_a_daemon_in_a_cluster_has_the_documented_role_and_keeps_its_volume() -> None:
    account, role, binding = map(yaml.safe_load, chart()[:3])
    assert [account, role, binding] == objects("docs/openenvd-rbac.yaml")
    # It has what the daemon knows of replicas that go on.
    [claim] = [each for each in chart() if "VolumeClaim\n" in each]
    assert "annotations: {helm.sh/resource-policy: keep}" in claim


def test_chart_pages_and_changelog_name_this_version() -> None:
    [about] = objects("docs/deploy/chart/Chart.yaml")
    assert about["version"] == about["appVersion"] == __version__
    image = re.compile(r"openenvd:(\d+\.[\w.]+)")
    for path in (
        "docs/deploy/chart/values.yaml",
        "docs/deploy/Dockerfile",
        "docs/how-to/kubernetes.md",
    ):
        assert set(image.findall((ROOT / path).read_text())) == {__version__}, path
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(\d[^]]*)\] - ", changes, re.MULTILINE)[:1] == [__version__]
