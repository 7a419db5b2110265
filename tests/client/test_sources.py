# SPDX-License-Identifier: Apache-2.0
"""What is launched, and what it is called."""

import os
from pathlib import Path

import pytest

from openenvd.client import sources
from openenvd.client.errors import ApiRefused


@pytest.mark.parametrize(
    ("text", "sent", "name"),
    [
        ("echo", "echo", "echo"),
        *((text, "{here}/echo", "echo") for text in ("./echo", "echo/", "sub/../echo")),
        ("ehco", "ehco", "ehco"),
        ("my_mod:MyEnv", "my_mod:MyEnv", "myenv"),
        ("a.b:Outer.Inner", "a.b:Outer.Inner", "inner"),
        ("docker://x/y/img:tag", "docker://x/y/img:tag", "img"),
        *((f"./{name}", f"{{here}}/{name}", name) for name in ("sameName", "MyEnv-2", "_private")),
    ],
)
def test_a_path_is_a_folder_and_all_else_is_sent_as_it_is(
    tmp_path: Path, text: str, sent: str, name: str
) -> None:
    assert sources.read_source(text, tmp_path) == sources.Source(sent.format(here=tmp_path), name)


def test_a_bundled_name_wins_over_a_folder_and_any_other_bare_name_is_one(tmp_path: Path) -> None:
    (tmp_path / "echo").mkdir()
    found = sources.read_source("echo", tmp_path)
    assert found.text == "echo"
    assert "./echo" in (found.note or "")
    (tmp_path / "mine").mkdir()
    found = sources.read_source("mine", tmp_path)
    assert (found.text, found.name) == (str(tmp_path / "mine"), "mine")
    assert str(tmp_path / "mine") in (found.note or "")


def test_paths_relative_to_a_folder_that_cannot_be_named_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.resolve_path("out") == Path.cwd() / "out"
    strange, gone = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "gone"
    for folder, why in ((strange, "is not UTF-8"), (gone, "was removed")):
        folder.mkdir()
        monkeypatch.chdir(folder)
        if folder is gone:
            folder.rmdir()
        assert sources.working_folder() == Path("/")
        assert sources.read_source("echo", Path("/")).text == "echo"
        assert sources.resolve_path("/out") == Path("/out")
        for text in ("out", "./out", "module:Class"):
            for refuse in (sources.resolve_path, sources.read_source):
                with pytest.raises(ApiRefused, match=why):
                    refuse(text, Path("/"))


def test_an_empty_word_is_refused_and_an_odd_path_is_left_to_the_daemon(tmp_path: Path) -> None:
    for text in ("", " "):
        with pytest.raises(ApiRefused, match="the source is empty") as caught:
            sources.read_source(text, tmp_path)
        assert "is a variable unset?" in str(caught.value.hint)
    for text in ("x" * 300, "~nobody-here/x"):
        assert sources.read_source(text, tmp_path).text == text


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ("name: My_Env  # a comment\n", "My_Env"),
        ("spec_version: 1\nname: 'two words'\n", "two-words"),
        ('name: "x"\n', "x"),
        ("app: x\n", "folder"),
        ("nested:\n  name: inner\n", "folder"),
        ("name:\n", "folder"),
        ("name: [\n", "folder"),
        ("name: inner\n\tapp: x\n", "folder"),
        ("{{{ not yaml", "folder"),
    ],
)
def test_the_manifest_names_a_folder(tmp_path: Path, manifest: str, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "openenv.yaml").write_text(manifest)
    assert sources.folder_name(folder) == name
