# SPDX-License-Identifier: Apache-2.0
"""Where things lie: the same for the daemon and for the workers that start replicas."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openenvd.schema.layout import MAX_SOCKET_PATH_BYTES, Layout, make_private


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


def test_a_private_folder_is_its_owners_alone(tmp_path: Path) -> None:
    assert make_private(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(PermissionError, match="another user"):
        make_private(tmp_path)


def test_a_private_folder_may_be_a_symlink_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    make_private(tmp_path / "home")
    assert make_private(tmp_path / "home" / "run").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a symlink to another user")
def test_a_symlink_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "planted").symlink_to(tmp_path)
    os.chown(tmp_path / "planted", 12345, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match="another user"):
        make_private(tmp_path / "planted")
