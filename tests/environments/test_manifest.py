# SPDX-License-Identifier: Apache-2.0
"""`openenv.yaml`: what is taken from it, and how mistakes in it are told."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from openenvd.environments.errors import ManifestError
from openenvd.environments.sources.manifest import MAX_BYTES, parse_manifest, read_manifest

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
    memory_mb: 1024
    disk_mb: 512
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
CPU = "name: x\nvalidation: {resources: {cpu: %s}}\n"


def test_the_keys_that_matter_are_taken_and_the_rest_is_kept() -> None:
    manifest = parse_manifest(PATH, TEMPLATE)
    assert (manifest.name, manifest.app) == ("my_env", "my_env.server.app:app")
    assert manifest.resources.cpu == 1.5
    assert manifest.resources.memory_bytes == 2**30
    assert manifest.resources.disk_bytes == 512 * 2**20
    assert manifest.resources.episode_timeout_seconds == 60
    assert manifest.resources.gpus == 2
    assert manifest.data["port"] == 8000


def test_the_default_app_is_the_templates() -> None:
    assert parse_manifest(PATH, "name: x").app == "server.app:app"


@pytest.mark.parametrize(
    ("text", "line", "field", "word"),
    [
        ("name: x\n  bad: [indent\n", 2, None, "mapping"),
        ("spec_version: 1\n", None, "name", "missing"),
        ("\nname: [a]\n", 2, "name", "text"),
        ("name: ''\n", 1, "name", "text"),
        ("name: x\napp: server.app\n", 2, "app", "module:attribute"),
        ("name: x\nclass: 3\n", 2, "class", "text"),
        ("name: x\nvalidation: all\n", 2, "validation", "fields"),
        ("name: x\nvalidation:\n  resources:\n    cpu: x\n", 4, f"{RESOURCES}.cpu", "number"),
        ("name: x\nvalidation: {resources: {memory_mb: -1}}\n", 2, f"{RESOURCES}.memory_mb", "-1"),
        ("name: x\nvalidation: {resources: {gpus: true}}\n", 2, f"{RESOURCES}.gpus", "True"),
        ("- a\n- b\n", 1, None, "mapping"),
        ("", 1, None, "mapping"),
        ("name: x\n---\nname: y\n", 2, None, "document"),
        ('name: "x\\ay"\n', 1, "name", "printable"),
        ("name: x\na: &a [*a]\n", None, None, "aliases"),
        ("name: x\n" + BOMB, None, None, "aliases"),
        ("name: x\n" + MERGES, None, None, "aliases"),
        (CPU % ".inf", 2, f"{RESOURCES}.cpu", "from 0 to 1,000,000,000, not inf"),
        (CPU % ".nan", 2, f"{RESOURCES}.cpu", "not nan"),
        (CPU % "1.0e+300", 2, f"{RESOURCES}.cpu", "not 1e+300"),
        (CPU % ("9" * 400), 2, f"{RESOURCES}.cpu", "not a larger one"),
        (CPU % ("0x" + "f" * 9999), 2, f"{RESOURCES}.cpu", "not a larger one"),
        (CPU % ("9" * 5000), None, None, "digits"),
        ("name: x\na: " + "[" * 5000, None, None, "deeply"),
        ("name: !!python/object:os.system x\n", 1, None, "constructor"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_line_and_field(
    text: str, line: int | None, field: str | None, word: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(PATH, text)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert str(PATH) in str(caught.value)
    assert line is None or f"line {line}" in str(caught.value)
    assert word in str(caught.value)


def test_a_manifest_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="UTF-8"):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "openenv.yaml")
    with pytest.raises(ManifestError, match="is not a file"):
        read_manifest(tmp_path)


def test_a_manifest_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "openenv.yaml").write_text("x" * (MAX_BYTES + 1))
    with pytest.raises(ManifestError, match="a manifest has at most"):
        read_manifest(tmp_path)


def test_a_repeated_part_may_be_written_once(tmp_path: Path) -> None:
    manifest = parse_manifest(PATH, "name: x\na: &a {b: 1}\nc: *a\n")
    assert manifest.data["c"] == {"b": 1}
