# SPDX-License-Identifier: Apache-2.0
"""Where things lie: the same for the daemon and for the workers that start replicas."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openenvd.schema.errors import InvalidName
from openenvd.schema.layout import MAX_SOCKET_PATH_BYTES, Layout, make_private
from openenvd.schema.spec import name_of_source, suggest_name, validate_name


def test_a_socket_path_is_never_too_long() -> None:
    layout = Layout(Path("/" + "deep/" * 30))
    path = layout.replica_socket("x" * 63 + "-999-0123456789abcdef")
    assert len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES


def test_a_home_keeps_its_label_when_its_machine_or_folder_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    with ThreadPoolExecutor(8) as threads:
        layouts = [Layout(tmp_path / "one")] * 8
        [label] = set(threads.map(lambda layout: layout.home_label, layouts))
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert Layout(tmp_path / "one").home_label == label
    (tmp_path / "one").rename(tmp_path / "two")
    assert Layout(tmp_path / "two").home_label == label
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["home-id"]
    (tmp_path / "one").mkdir()
    assert Layout(tmp_path / "one").home_label != label


def test_a_private_folder_or_symlink_is_its_owners_alone(tmp_path: Path) -> None:
    assert make_private(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    make_private(tmp_path / "home")
    assert make_private(tmp_path / "home" / "run").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_or_symlink_of_another_user_is_refused(tmp_path: Path) -> None:
    planted, folder, to_it = (tmp_path / name for name in ("planted", "folder", "to_it"))
    planted.symlink_to(tmp_path)
    folder.mkdir()
    to_it.symlink_to(folder)
    for path in (planted, folder):
        os.chown(path, 12345, -1, follow_symlinks=False)
    for path in (planted, folder, to_it):
        with pytest.raises(PermissionError, match="another user"):
            make_private(path)


# What an environment may be called.


@pytest.mark.parametrize(
    "name", ["a", "echo", "my_env", "sameName", "_a", "trial-3", "v1.2", "x" * 63]
)
def test_names_that_can_be_a_folder_and_a_label_are_taken(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../escape", "a/b", "-a", "Ä", "Ächo", "a b", "a\n", "x" * 64]
)
def test_other_names_are_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        validate_name(name)
    assert caught.value.hint is not None
    assert "--name" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "told", "nearest"),
    [
        ("my env", "may not have ' '", "my-env"),
        ("sameNäme", "may not have 'ä'", "sameN-me"),
        (".Env", "may not begin with '.'", "Env"),
        ("_a/B", "may not have '/'", "_a-B"),
    ],
)
def test_the_character_that_is_not_allowed_is_named_and_the_nearest_name_offered(
    name: str, told: str, nearest: str
) -> None:
    with pytest.raises(InvalidName) as caught:
        validate_name(name)
    assert told in caught.value.message
    assert str(caught.value.hint).endswith(f"--name {nearest}")


@pytest.mark.parametrize("text", ["../escape", "Some Name", "", "...", "Ä" * 80, "x" * 80])
def test_a_suggested_name_is_valid(text: str) -> None:
    validate_name(suggest_name(text))


@pytest.mark.parametrize(
    ("source", "name"),
    [("echo", "echo"), ("/some/where/my_env", "my_env"), ("./a", "a"), ("m.n:My.Class", "class")],
)
def test_a_source_gives_its_environment_a_name(source: str, name: str) -> None:
    assert name_of_source(source) == name
