# SPDX-License-Identifier: Apache-2.0
"""Messages about a full disk, and about a folder that permits no access."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from openenvd.client import daemon
from openenvd.client.errors import DaemonNotStarted
from openenvd.environments.preparation.uv import UvFailed
from openenvd.executor.worker import describe_error
from openenvd.schema.settings import Paths
from openenvd.server.errors import DaemonError
from openenvd.server.listening import hold_lock
from openenvd.system.files import disk_space

from ..disks import use_up_files


def test_a_full_disk_is_known_by_its_error_also_of_a_copied_tree_whose_target_is_named(
    full_disk: Path, tmp_path: Path
) -> None:
    for number, is_full in ((errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)):
        assert disk_space.is_full(OSError(number, os.strerror(number))) is is_full, number
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content")
    with pytest.raises(shutil.Error) as told:
        shutil.copytree(tmp_path / "tree", full_disk, dirs_exist_ok=True)
    assert disk_space.is_full(told.value)
    exc = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/from/file", None, "/to/file")
    assert disk_space.folder_of(exc, Path("/home")) == Path("/to")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o600, 0o755])
def test_the_folder_that_permits_no_access_is_named(mode: int) -> None:
    code = (
        "import errno, os, sys; from pathlib import Path\n"
        "from openenvd.system.files.disk_space import why_refused\n"
        "os.setuid(65534)\n"
        "print(why_refused(Path(sys.argv[1], 'a/b'), OSError(errno.EACCES, 'denied')))"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(mode)
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    place = f"{folder} belongs to the user id 0 ({stat.filemode(stat.S_IFDIR | mode)})"
    assert done.stdout == f"denied, since {place}\n"


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A disk that has no room for another file."""
    use_up_files(small_disk)
    return small_disk


def test_a_home_that_cannot_be_made_on_a_full_disk_is_no_matter_of_permissions(
    full_disk: Path,
) -> None:
    paths = Paths(full_disk / "home")
    with pytest.raises(DaemonNotStarted) as by_client:
        daemon.connect(paths)
    with pytest.raises(DaemonError) as by_daemon, hold_lock(paths):
        pass
    for error in (by_client.value, by_daemon.value):
        assert error.message == f"no space left on the disk of {full_disk}/home"
        assert error.hint is not None
        assert f"df -h {full_disk}, " in error.hint  # the home is not there
        assert "openenv prune" in error.hint
        assert "permissions" not in error.hint


@pytest.mark.parametrize("file", ["/elsewhere/file", None])
def test_an_operation_that_met_a_full_disk_names_the_disk(tmp_path: Path, file: str | None) -> None:
    reason = os.strerror(errno.ENOSPC)
    raised = OSError(errno.ENOSPC, reason, file) if file else OSError(errno.ENOSPC, reason)
    error = describe_error(raised, tmp_path)
    folder = "/elsewhere" if file else tmp_path
    assert error["message"] == f"no space left on the disk of {folder}"
    assert "openenv prune" in error["hint"]


def test_uv_that_met_a_full_disk_is_no_matter_of_the_package_index() -> None:
    """The words are uv's own."""
    lines = [
        "error: Failed to write to the cache",
        "  cause: No space left on device (os error 28)",
    ]
    told = UvFailed(2, lines).explained("the dependencies cannot be installed", "look at x")
    assert (
        told.hint
        == "see with df -h which disk is full; uv cache clean and openenv prune free space"
    )
