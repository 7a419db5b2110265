# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.system.memory.cgroup_tree import locate

from .disks import mounted

SMALL_DISK_BYTES = 2 * 2**20

# Started in the background of a shell, we would have been told to ignore Ctrl-C, and would hand
# that down to the commands that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Two processes a core: most tests wait for processes and sockets; at most eight."""
    return min(8, 2 * len(os.sched_getaffinity(0)) if sys.platform == "linux" else 4)


@pytest.fixture(scope="session", autouse=True)
def outside_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A short folder for temporary files, removed afterwards, and no package index.

    The sockets of a home with a long path, as pytest's are, are made in the folder for temporary
    files, and a daemon that is killed leaves them.
    """
    tmp_path_factory.getbasetemp()  # decided now: it is to be kept, and not inside
    folder = tempfile.mkdtemp(prefix="oe-")
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", folder)
    patch.setattr(tempfile, "tempdir", None)
    # No test asks a package index: what uv installs comes from folders of wheels.
    patch.setenv("UV_OFFLINE", "1")
    yield
    patch.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """A real control group that counts processes; skips where none can be made."""
    own = locate("pids")
    group = Path("/nowhere" if own is None else own.directory) / f"openenvd-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("max")
    except OSError as exc:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of processes can be made here: {exc}")
    yield group
    deadline = time.monotonic() + 5.0
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError as exc:  # a process that has exited may hold it for a moment yet
            if exc.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of two megabytes and 512 files."""
    with mounted(tmp_path / "disk", f"size={SMALL_DISK_BYTES},nr_inodes=512") as folder:
        yield folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock of this process: its only element is the time."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now
