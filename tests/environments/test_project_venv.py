# SPDX-License-Identifier: Apache-2.0
"""A project's own Python: made by the real uv from a folder of wheels, with no network."""

from __future__ import annotations

import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from openenvd.environments.errors import PreparationFailed
from openenvd.environments.layout import Layout
from openenvd.environments.sources.resolve import Project, resolve
from openenvd.environments.venv import project_venv
from openenvd.environments.venv.project_venv import is_complete, project_python, venv_key

PYPROJECT = '[project]\nname = "sample"\nversion = "1"\n'


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where packages come from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(project_venv, "HOST_REQUIREMENTS", ())
    monkeypatch.setattr(project_venv, "HOST_EXTRAS", ("thing",))
    make_wheel(folder, "thing", "1.0")
    make_wheel(folder, "thing", "2.0")
    return folder


def make_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


def make_project(folder: Path, *lines: str, **files: str) -> Project:
    folder.mkdir(exist_ok=True)
    (folder / "openenv.yaml").write_text("name: sample\n")
    (folder / "pyproject.toml").write_text(PYPROJECT + "\n".join(lines))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    found = resolve(str(folder), folder)
    assert isinstance(found, Project)
    return found


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def version_seen_by(python: Path | None) -> str:
    assert python is not None
    code = "import thing; print(thing.version)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.usefixtures("wheels")
def test_dependencies_are_installed_and_the_projects_folder_is_unchanged(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    before = listing(project.folder)
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "1.0"
    assert listing(project.folder) == before
    assert any("dependencies installed" in line for line in said)


@pytest.mark.usefixtures("wheels")
def test_a_second_launch_reuses_the_environment_silently(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    first = project_python(project, layout, lambda _: None)
    said: list[str] = []
    assert project_python(project, layout, said.append) == first
    assert said == []


@pytest.mark.usefixtures("wheels")
def test_a_lock_file_decides_the_versions(tmp_path: Path, layout: Layout) -> None:
    project = make_project(
        tmp_path / "p", 'requires-python = ">=3.11"', 'dependencies = ["thing<2"]'
    )
    lock = [project_venv.find_uv(), "lock", "--quiet", "--no-index"]
    subprocess.run(lock, cwd=project.folder, check=True)
    make_wheel(tmp_path / "wheels", "thing", "1.5")
    before = listing(project.folder)
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"
    assert listing(project.folder) == before


@pytest.mark.usefixtures("wheels")
def test_a_project_with_requirements_alone_is_served_too(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", requirements_txt="thing==2.0\n")
    (project.folder / "pyproject.toml").unlink()
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "2.0"


def test_a_project_without_requirements_runs_in_our_own_python(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p")
    (project.folder / "pyproject.toml").unlink()
    assert project_python(project, layout, lambda _: None) is None


@pytest.mark.usefixtures("wheels")
def test_a_failure_shows_uvs_last_lines_and_does_not_prevent_a_retry(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["other-thing"]')
    with pytest.raises(PreparationFailed) as caught:
        project_python(project, layout, lambda _: None)
    assert "other-thing was not found" in str(caught.value)
    assert "pyproject.toml" in str(caught.value.hint)
    assert not (layout.venvs / venv_key(project)).exists()
    make_wheel(tmp_path / "wheels", "other_thing", "1.0")
    assert project_python(project, layout, lambda _: None) is not None


@pytest.mark.usefixtures("wheels")
def test_an_incomplete_environment_is_made_again(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    half = layout.venvs / venv_key(project)
    (half / "bin").mkdir(parents=True)
    (half / "bin" / "python").write_text("half made")
    assert not is_complete(half)
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"


@pytest.mark.usefixtures("wheels")
def test_an_environment_whose_python_was_removed_is_made_again(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    python = project_python(project, layout, lambda _: None)
    assert python is not None
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"


@pytest.mark.usefixtures("wheels")
def test_concurrent_launches_make_one_environment(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    said: list[str] = []
    found: list[Path | None] = []

    def launch() -> None:
        found.append(project_python(project, layout, said.append))

    launches = [threading.Thread(target=launch) for _ in range(4)]
    for thread in launches:
        thread.start()
    for thread in launches:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sum("dependencies installed" in line for line in said) == 1


@pytest.mark.usefixtures("wheels")
def test_a_cancelled_launch_leaves_no_uv_and_no_rubbish(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cancelled(BaseException):
        pass

    processes: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[str]:
        processes.append(real(*args, **options))  # type: ignore[call-overload]
        return processes[-1]

    def say(line: str) -> None:
        if "uv:" in line:
            raise Cancelled

    monkeypatch.setattr(subprocess, "Popen", noted)
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    with pytest.raises(Cancelled):
        project_python(project, layout, say)
    assert all(process.returncode is not None for process in processes)
    assert not (layout.venvs / venv_key(project)).exists()


@pytest.mark.usefixtures("wheels")
def test_extras_that_cannot_be_had_are_done_without(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_venv, "HOST_EXTRAS", ("not-there",))
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    said: list[str] = []
    assert project_python(project, layout, said.append) is not None
    assert "continuing without not-there" in said


@pytest.mark.usefixtures("wheels")
def test_a_missing_python_version_is_reported(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", 'requires-python = ">=4.5"')
    with pytest.raises(PreparationFailed, match=r"sample needs Python >=4\.5"):
        project_python(project, layout, lambda _: None)


@pytest.mark.usefixtures("wheels")
def test_builds_write_into_a_copy_of_the_project(tmp_path: Path, layout: Layout) -> None:
    project = make_project(
        tmp_path / "p",
        'dynamic = ["dependencies"]',
        "[build-system]",
        "requires = []",
        'build-backend = "backend"',
        'backend-path = ["."]',
    )
    (project.folder / "backend.py").write_text(BACKEND)
    before = listing(project.folder)
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"
    assert listing(project.folder) == before


BACKEND = """
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    pathlib.Path("left-behind").touch()
    info = pathlib.Path(folder, "sample-1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: sample\\nVersion: 1\\nRequires-Dist: thing==1.0\\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nTag: py3-none-any\\n")
    return info.name
"""


def test_the_key_depends_on_the_dependencies_and_not_on_the_folder(tmp_path: Path) -> None:
    one = make_project(tmp_path / "one", 'dependencies = ["thing"]')
    same = make_project(tmp_path / "same", 'dependencies = ["thing"]')
    other = make_project(tmp_path / "other", 'dependencies = ["thing==1.0"]')
    locked = make_project(tmp_path / "locked", 'dependencies = ["thing"]', uv_lock="version = 1\n")
    assert venv_key(one) == venv_key(same)
    assert len({venv_key(one), venv_key(other), venv_key(locked)}) == 3


def test_a_project_that_refers_to_folders_is_keyed_by_its_place(tmp_path: Path) -> None:
    text = ('dependencies = ["lib"]', '[tool.uv.sources]\nlib = { path = "../lib" }')
    one, other = (make_project(tmp_path / name, *text) for name in ("one", "other"))
    assert venv_key(one) != venv_key(other)


def test_passwords_of_an_index_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:secret@mirror.example/simple")
    assert "secret" not in project_venv.package_source()
    assert "mirror.example" in project_venv.package_source()
