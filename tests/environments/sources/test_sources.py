# SPDX-License-Identifier: Apache-2.0
"""Resolves a source, as the user wrote it, to the environment it names."""

import re
from pathlib import Path

import pytest

from openenvd.environments.sources.resolve import (
    Bundled,
    ClassSource,
    Image,
    Project,
    check_source,
    resolve,
)
from openenvd.schema.errors import ManifestError, UnknownSource


def make_project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "openenv.yaml").write_text("name: sample\n")
    return folder


def refusal(source: str, cwd: Path) -> UnknownSource:
    with pytest.raises(UnknownSource) as caught:
        resolve(source, cwd)
    return caught.value


def test_a_bundled_name_wins_and_a_class_and_an_image_are_sources(tmp_path: Path) -> None:
    make_project(tmp_path / "echo")
    assert isinstance(resolve("echo", tmp_path), Bundled)
    assert isinstance(resolve("./echo", tmp_path), Project)
    assert resolve("pkg.module:Class", tmp_path) == ClassSource("pkg.module:Class", tmp_path)
    assert resolve("docker://org/echo:1", tmp_path) == Image("org/echo:1")


def test_a_folder_is_meant_from_where_the_user_is(tmp_path: Path) -> None:
    folder = make_project(tmp_path / "a" / "sample")
    for source, cwd in [("sample", folder.parent), (str(folder), Path("/")), (".", folder)]:
        found = resolve(source, cwd)
        assert isinstance(found, Project)
        assert found.folder == folder


def test_an_unknown_name_is_answered_with_similar_and_bundled_names(tmp_path: Path) -> None:
    hint = str(refusal("ehco", tmp_path).hint)
    assert "did you mean echo?" in hint
    assert "openenv.yaml" in hint


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (".", r"has no openenv\.yaml"),
        ("./sample/server", "is not an environment"),
        ("sample/openenv.yaml", "is a file"),
    ],
)
def test_the_hint_names_a_project_inside_or_above(
    tmp_path: Path, source: str, expected: str
) -> None:
    folder = make_project(tmp_path / "sample")
    (folder / "server").mkdir()
    (folder / "server" / "app.py").write_text("app = object()\n")  # is no other project
    refused = refusal(source, tmp_path)
    assert re.search(expected, refused.message)
    assert f"openenv launch {folder}" in str(refused.hint)


@pytest.mark.parametrize("source", ["mine.py", "./mine.py", "mine"])
def test_a_module_is_launched_by_a_class_of_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.py").touch()
    hint = f"launch a class of it, in {tmp_path}: openenv launch mine:CLASS"
    assert refusal(source, tmp_path).hint == hint


@pytest.mark.parametrize("path", ["mine.py", "mine/__init__.py", "mine/sub.py", "mine.pyc"])
def test_a_class_is_accepted_as_soon_as_its_module_is_beside_the_user(
    tmp_path: Path, path: str
) -> None:
    of_class = {"source": "mine:Env", "cwd": str(tmp_path)}
    with pytest.raises(UnknownSource, match=f"there is no module mine in {tmp_path}"):
        check_source(of_class)
    check_source({**of_class, "with_packages": ["mine"]})
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    check_source(of_class)


@pytest.mark.parametrize("module", ["json", "sys", "pytest", "openenvd.env_host", "__main__"])
def test_a_class_may_be_of_an_installed_module(tmp_path: Path, module: str) -> None:
    check_source({"source": f"{module}:Env", "cwd": str(tmp_path)})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("https://hub.example/x", "write git+https://hub.example/x"),
        ("git+ssh://x/y", "or launch a clone of it"),
        ("x" * 300, "cannot be looked for: File name too long"),
        ("~nobody-here/x", "cannot be looked for: Could not determine home directory"),
    ],
)
def test_a_source_that_cannot_be_had_is_refused_as_such(
    tmp_path: Path, source: str, why: str
) -> None:
    refused = refusal(source, tmp_path)
    assert why in refused.message + str(refused.hint)
    assert "git+https" in refused.message or "launch a bundled name" in str(refused.hint)


@pytest.mark.parametrize("text", ["name: x\n bad: [", "", "- a list\n", "just text\n"])
def test_a_manifest_that_cannot_be_used_is_a_warning_where_an_app_is_found(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "openenv.yaml").write_text(text)
    with pytest.raises(ManifestError):
        resolve(".", tmp_path)
    (tmp_path / "main.py").write_text("app = object()\n")
    found = resolve(".", tmp_path)
    assert isinstance(found, Project)
    warning, note = found.notes()
    assert warning.startswith(f"warning: {tmp_path / 'openenv.yaml'}")
    assert warning.endswith("; going on as if there were none")
    assert note.startswith("note: serving main:app")


def test_a_folder_with_an_app_needs_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("app = object()\n")
    found = resolve(".", tmp_path)
    assert isinstance(found, Project)
    assert found.manifest.name == tmp_path.name
    assert found.notes() == (f"note: serving main:app, the only app that was found in {tmp_path}",)
    (tmp_path / "Dockerfile").write_text("ENV KEY=secret LEVEL=5 DATA=/gone/x MORE=/gone/y\n")
    found = resolve(".", tmp_path)
    assert isinstance(found, Project)
    notes = "\n".join(found.notes(["LEVEL", "MORE"]))
    assert "Dockerfile sets KEY (-e NAME=VALUE overrides)" in notes
    assert "DATA of Dockerfile: not passed on" in notes
    assert notes.endswith("give it with -e DATA=…")
    assert not any(word in notes for word in ("secret", "LEVEL", "gone", "MORE"))
