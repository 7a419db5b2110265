# SPDX-License-Identifier: Apache-2.0
"""What is said when the system refuses one more process: which limit, and how much of it is used.

SkyPilot #10559: 40 launches hit the limit, and no message said which.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenvd.environments.shim.server_exit import why_no_server
from openenvd.system.memory.limits import (
    NO_ROOM,
    ProcessRoom,
    is_no_room,
    process_room,
    tells_no_room,
    why_not_started,
)

MOUNTS = "39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
REFUSED = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

FORK_IN_VAIN = """
import os, sys
from pathlib import Path
from openenvd.system.memory.limits import is_no_room, why_not_started
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
Path(sys.argv[1], "pids.max").write_text("1")
try:
    os.fork()
except OSError as exc:
    print(is_no_room(exc), why_not_started(exc))
"""


def tree(root: Path, groups: dict[str, tuple[str, int]]) -> Path:
    files = {"proc/self/cgroup": "2:pids:/a/b\n", "proc/self/mountinfo": MOUNTS}
    for group, (limit, used) in groups.items():
        files[f"sys/fs/cgroup/pids{group}/pids.max"] = limit
        files[f"sys/fs/cgroup/pids{group}/pids.current"] = str(used)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_limit_with_least_room_is_reported(tmp_path: Path) -> None:
    root = tree(tmp_path, {"/a": ("300", 298), "/a/b": ("64", 10)})
    room = process_room(str(root))
    assert room == ProcessRoom(300, 298, "cgroup v1 pids.max at /a")
    assert room.left == 2
    assert room.sentence() == (
        "298 of 300 processes and threads are in use (cgroup v1 pids.max at /a)"
    )


def test_without_a_limit_there_is_no_end_of_room(tmp_path: Path) -> None:
    assert process_room(str(tree(tmp_path, {"/a": ("max", 298)}))) is None


def test_a_fork_that_a_control_group_refuses_names_the_group(pids_group: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FORK_IN_VAIN, str(pids_group)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    where = f"1 of 1 processes and threads are in use (cgroup v{{}} pids.max at /{pids_group.name})"
    assert found.strip() in [f"True {NO_ROOM}: {where.format(version)}" for version in (1, 2)]


def read_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.recv(1)


def fork_in_vain() -> None:
    """As a function that calls `os.fork`, which raises within it."""
    if os.getpid():
        raise REFUSED
    os.fork()


def start_a_thread() -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("call", "is_refused"),
    [(read_nothing, False), (fork_in_vain, True), (start_a_thread, True)],
)
def test_a_refused_fork_is_distinguished_from_an_empty_pipe(
    call: Callable[[], None], is_refused: bool
) -> None:
    with pytest.raises((BlockingIOError, RuntimeError)) as raised:
        call()
    assert is_no_room(raised.value) is is_refused


def test_other_reasons_are_reported_unchanged() -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert why_not_started(missing) == "No such file or directory (FileNotFoundError)"
    assert not tells_no_room(why_not_started(missing))


def test_a_shim_names_the_limit_too() -> None:
    assert why_no_server(REFUSED).startswith(NO_ROOM)
    assert why_no_server(OSError(errno.EACCES, "denied", "/x")) == "denied: /x"
