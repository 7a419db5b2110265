# SPDX-License-Identifier: Apache-2.0
"""`openenv.yaml`: what is taken from it, and how mistakes in it are told."""

import itertools
import os
from pathlib import Path

import pytest

from openenvd.environments.sources.manifest import MAX_BYTES, parse_manifest, read_manifest
from openenvd.schema.errors import ManifestError

PATH = Path("/projects/x/openenv.yaml")
RESOURCES = "validation.resources"
TEMPLATE = """\
spec_version: 1
name: my_env
app: my_env.server.app:app
port: 8000
validation:
  resources:
    cpu: 1.5
    episode_timeout_s: 60
    gpus: 2
"""
BOMB = "a: &a [1, 2, 3]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{one}'] * 9)}]\n"
    for one, after in itertools.pairwise("abcdefghi")
)


MERGES = "a: &a {k: 1}\n" + "".join(
    f"{after}: &{after}\n  <<: [{', '.join([f'*{one}'] * 9)}]\n"
    for one, after in itertools.pairwise("abcdefghijk")
)
GPUS = "name: x\nvalidation: {resources: {gpus: %s}}\n"


def test_known_keys_are_taken_the_rest_kept_and_parts_written_once(tmp_path: Path) -> None:
    manifest = parse_manifest(PATH, TEMPLATE)
    assert (manifest.name, manifest.app) == ("my_env", "my_env.server.app:app")
    assert (manifest.gpus, manifest.episode_timeout_seconds) == (2, 60)
    assert manifest.data["port"] == 8000
    manifest = parse_manifest(PATH, "name: x\na: &a {b: 1}\nc: *a\n")
    assert manifest.data["c"] == {"b": 1}


@pytest.mark.parametrize(
    ("app", "reference"),
    [
        ("server/app.py", "server.app:app"),
        ("./server/app.py", "server.app:app"),
        ("app.py", "app:app"),
        ("server/app.py:api", "server.app:api"),
        ("server.app", "server.app:app"),
        ("server.app:create_app()", "server.app:create_app()"),
        ("{port: 7860}", None),
        ("{module: server.app, port: 1}", "server.app:app"),
        ("{command: 'uvicorn server.app:api --host 0.0.0.0 --port 80'}", "server.app:api"),
        ("{title: My app, entry: 'server.app:api'}", "server.app:api"),
        ("[server.app:app]", None),
        ("3", None),
        ("true", None),
        ("", None),
    ],
)
def test_an_app_may_be_written_as_a_path_or_a_mapping(app: str, reference: str | None) -> None:
    manifest = parse_manifest(PATH, f"name: x\napp: {app}\n")
    assert manifest.app == reference
    assert bool(manifest.warnings) is (reference is None and app != "")
    assert all(f"{PATH}, line 2: app: " in each for each in manifest.warnings)


@pytest.mark.parametrize(
    ("text", "name"),
    [("app: a:b\n", "x"), ("name:\n", "x"), ("name: 2048\n", "2048"), ("name: [a]\n", "x")],
)
def test_a_project_without_a_name_has_that_of_its_folder(text: str, name: str) -> None:
    assert parse_manifest(PATH, text).name == name


@pytest.mark.parametrize(
    ("text", "line", "field", "word"),
    [
        ("name: x\n  bad: [indent\n", 2, None, "mapping"),
        ("\nname: [a]\n", 2, "name", "text"),
        ("name: ''\n", 1, "name", "text"),
        ("name: x\napp: an app\n", 2, "app", "module:attribute"),
        ("name: x\nclass: 3\n", 2, "class", "text"),
        ("name: x\nreset_first: 'no'\n", 2, "reset_first", "true or false"),
        ("name: x\nvalidation: all\n", 2, "validation", "fields"),
        ("name: x\nvalidation:\n  resources:\n    gpus: x\n", 4, f"{RESOURCES}.gpus", "number"),
        (GPUS % "-1", 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % "true", 2, f"{RESOURCES}.gpus", "True"),
        ("- a\n- b\n", 1, None, "mapping"),
        ("", 1, None, "mapping"),
        ("name: x\n---\nname: y\n", 2, None, "document"),
        ('name: "x\\ay"\n', 1, "name", "printable"),
        ("name: x\na: &a [*a]\n", None, None, "aliases"),
        ("name: x\n" + BOMB, None, None, "aliases"),
        ("name: x\n" + MERGES, None, None, "aliases"),
        (GPUS % ".inf", 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % ".nan", 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % "1.0e+300", 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % ("9" * 400), 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % ("0x" + "f" * 9999), 2, f"{RESOURCES}.gpus", "from 0 to 1,000,000,000"),
        (GPUS % ("9" * 5000), None, None, "digits"),
        ("name: x\na: " + "[" * 5000, None, None, "deeply"),
        ("name: !!python/object:os.system x\n", 1, None, "constructor"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_warning_with_line_and_field(
    tmp_path: Path, text: str, line: int | None, field: str | None, word: str
) -> None:
    path = tmp_path / "openenv.yaml"
    path.write_text(text)
    manifest = read_manifest(tmp_path)
    [warning] = manifest.warnings
    where = f"{path}: " if line is None else f"{path}, line {line}: "
    assert warning.startswith(where if field is None else f"{where}{field}: ")
    assert word in warning
    assert manifest.name == (tmp_path.name if field in (None, "name") else "x")
    assert (manifest.fault is None) is (field is not None)


def test_a_mistake_beside_a_class_which_we_alone_serve_is_an_error() -> None:
    with pytest.raises(ManifestError, match=f"line 3: {RESOURCES}.gpus: "):
        parse_manifest(PATH, "class: a:B\n" + GPUS % "x")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xfe\x00", "UTF-8"),
        (b"x" * (MAX_BYTES + 1), "a manifest has at most"),
        (None, "No such file"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_nothing(
    tmp_path: Path, content: bytes | None, word: str
) -> None:
    if content is not None:
        (tmp_path / "openenv.yaml").write_bytes(content)
    assert word in str(read_manifest(tmp_path).fault)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "openenv.yaml")
    assert "is not a file" in str(read_manifest(tmp_path).fault)
