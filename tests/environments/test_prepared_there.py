# SPDX-License-Identifier: Apache-2.0
"""What is launched, prepared by another process, with another home: as on a login node."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from openenvd.environments.engines.slurm_ssh import LoginNode
from openenvd.environments.errors import EngineFailed, PreparationFailed
from openenvd.environments.layout import Layout
from openenvd.environments.providers.prepared_there import _unpack, prepare_there
from openenvd.environments.sources.program import Program
from openenvd.environments.sources.resolve import resolve
from openenvd.environments.spec import EnvironmentSpec

HOST = {"OPENENV_SLURM_SSH": "login"}
MANIFEST = "spec_version: 1\nname: sample\nruntime: fastapi\napp: server.app:app\nport: 8000\n"


class ElsewhereHere(LoginNode):
    """A login node that is this machine, without ssh."""

    def __init__(self, layout: Layout, there: Path, python: str = sys.executable) -> None:
        super().__init__({**HOST, "OPENENV_SLURM_SSH_PYTHON": python}, layout)
        self.there = there
        self.python = python
        self.before: list[str] = []

    def command(self, module: str) -> list[str]:
        return [*self.before, "env", f"OPENENV_HOME={self.there}", self.python, "-P", "-m", module]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my_env"
    (folder / "server").mkdir(parents=True)
    (folder / "openenv.yaml").write_text(MANIFEST)
    (folder / "server" / "app.py").write_text("app = None\n")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "large").write_text("not copied")
    return folder


def prepared(
    layout: Layout, there: Path, source: str, cwd: Path, **more: Mapping[str, str]
) -> Program:
    spec = EnvironmentSpec(name="sample", source=source, provider="slurm", **more)  # type: ignore[arg-type]  # a test's
    return prepare_there(ElsewhereHere(layout, there), spec, resolve(source, cwd), print)


def test_a_project_is_copied_once_and_runs_there(
    layout: Layout, tmp_path: Path, project: Path
) -> None:
    there = tmp_path / "there"
    first = prepared(layout, there, str(project), tmp_path, env={"GREETING": "hello"})
    copies = there / "slurm" / "sources"
    assert first.folder.parent.parent.parent == copies
    assert (first.folder / "server" / "app.py").read_text() == "app = None\n"
    assert not (first.folder / ".venv").exists()
    assert first.variables is not None
    assert first.variables["OPENENV_HOME"] == str(there)
    assert first.variables["GREETING"] == "hello"
    assert all(path.startswith(str(copies)) for path in first.config.import_paths)
    (first.folder / "mark").touch()
    assert prepared(layout, there, str(project), tmp_path).folder == first.folder
    assert (first.folder / "mark").exists()
    (project / "server" / "app.py").write_text("app = 1\n")
    assert prepared(layout, there, str(project), tmp_path).folder != first.folder


def test_a_class_is_copied_with_its_module(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text("class Sample: pass\n")
    (tmp_path / "other.py").write_text("")
    found = prepared(layout, tmp_path / "there", "sample:Sample", tmp_path)
    assert [path.name for path in found.folder.iterdir()] == ["sample.py"]
    assert found.config.env_class == "sample:Sample"


def test_what_fails_there_is_told_here(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text("class Sample: pass\n")
    with pytest.raises(PreparationFailed, match="Sample is a class"):
        prepared(layout, tmp_path / "there", "sample:Sample", tmp_path, serve_as_is=True)  # type: ignore[arg-type]  # a test's


def test_files_that_there_is_no_room_for_are_told_and_leave_nothing(
    layout: Layout, tmp_path: Path, project: Path
) -> None:
    (project / "model").write_bytes(bytes(4 << 20))
    there = tmp_path / "there"
    node = ElsewhereHere(layout, there)
    node.before = ["sh", "-c", 'ulimit -f 128 && exec "$@"', "sh"]  # as a quota: 64 KB
    spec = EnvironmentSpec(name="sample", source=str(project), provider="slurm")
    with pytest.raises(PreparationFailed, match="File too large"):
        prepare_there(node, spec, resolve(str(project), tmp_path), print)
    [version] = (there / "slurm" / "sources").glob("*/*")
    assert list(version.iterdir()) == []


def test_a_copy_that_another_launch_has_made_meanwhile_is_used_and_the_own_one_removed(
    tmp_path: Path,
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(__file__, "app.py")
    folder = tmp_path / "version" / "my_env"
    (folder / "server").mkdir(parents=True)
    archive.seek(0)
    _unpack(archive, folder, 1)
    assert [path.name for path in folder.parent.iterdir()] == ["my_env"]
    assert [path.name for path in folder.iterdir()] == ["server"]


def test_a_copy_that_is_broken_off_between_two_files_is_not_used(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("app.py", "model.py"):
            tar.addfile(tarfile.TarInfo(name))
    folder = tmp_path / "version" / "my_env"
    with pytest.raises(OSError, match="broke"):
        _unpack(io.BytesIO(archive.getvalue()[:512]), folder, 2)
    assert list(folder.parent.iterdir()) == []


def test_without_ssh_a_launch_says_what_installs_it(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = EnvironmentSpec(name="echo", source="echo", provider="slurm")
    node = LoginNode({**HOST, "OPENENV_SLURM_SSH_PYTHON": "python"}, layout)
    with pytest.raises(EngineFailed, match="no command ssh") as told:
        prepare_there(node, spec, resolve("echo", tmp_path), print)
    assert "openssh-client" in str(told.value.hint)


def test_a_machine_without_openenvd_is_told(layout: Layout, tmp_path: Path) -> None:
    node = ElsewhereHere(layout, tmp_path / "there", "/nowhere/python")
    spec = EnvironmentSpec(name="echo", source="echo", provider="slurm")
    with pytest.raises(EngineFailed, match="login has no openenvd at /nowhere/python"):
        prepare_there(node, spec, resolve("echo", tmp_path), print)
