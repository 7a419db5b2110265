# SPDX-License-Identifier: Apache-2.0
"""Limits on trees of files: v1, v2, hybrid, containers, and nothing at all; and what is said of it.

SkyPilot #10559: 40 launches hit the limit of processes, and no message said which.
"""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openenvd.environments.shim.server_exit import why_no_server
from openenvd.system.memory.cgroup_tree import free_memory_bytes
from openenvd.system.memory.limits import (
    NO_ROOM,
    ProcessRoom,
    available_memory_bytes,
    is_no_room,
    process_room,
    read_limits,
    tells_no_room,
    why_not_started,
)

MB = 1 << 20
GB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"
V1_MOUNTS = """\
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
IN_CONTAINER = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
Files = dict[str, str]
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


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Files], str]:
    """Writes a tree of files of a machine with 8 CPUs and 16 GB; files of groups by their path."""

    def write(files: Files) -> str:
        machine = {
            "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
            "proc/cpuinfo": "".join(f"processor\t: {n}\n\n" for n in range(8)),
        }
        for name, text in {**machine, **files}.items():
            path = tmp_path / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return write


def _v1(path: str, mounts: str = V1_MOUNTS) -> Files:
    groups = "".join(f"{n}:{name}:{path}\n" for n, name in enumerate(("memory", "cpu", "pids"), 2))
    groups = groups.replace(":cpu:", ":cpu,cpuacct:")
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}


def _v2(path: str) -> Files:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNTS}


# Files; CPUs, bytes and processes; where the latter two were found.
TREES: dict[str, tuple[Files, tuple[float, int, int | None], dict[str, str]]] = {
    "no groups": ({}, (8, 16 * GB, None), {"cpus": "machine", "memory_bytes": "machine"}),
    "every level of v1": (
        _v1("/a/b")
        | {
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/a/memory.limit_in_bytes": str(512 * MB),
            "memory/a/b/memory.limit_in_bytes": str(750 * MB),
            "cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
            "pids/a/b/pids.max": "max\n",
            "pids/a/pids.max": "300\n",
        },
        (0.5, 512 * MB, 300),
        {
            "cpus": "cgroup v1 cpu.cfs_quota_us at /a/b",
            "memory_bytes": "cgroup v1 memory.limit_in_bytes at /a",
            "pids": "cgroup v1 pids.max at /a",
        },
    ),
    "every level of v2, and the throttle": (
        _v2("/user.slice/app.scope")
        | {
            "user.slice/memory.max": str(2 * GB),
            "user.slice/cpu.max": "max 100000\n",
            "user.slice/app.scope/memory.max": "max\n",
            "user.slice/app.scope/memory.high": str(GB),
            "user.slice/app.scope/cpu.max": "150000 100000\n",
            "user.slice/app.scope/pids.max": "100\n",
        },
        (1.5, GB, 100),
        {"memory_bytes": "cgroup v2 memory.high at /user.slice/app.scope"},
    ),
    "memory in v1, the v2 tree beside it": (
        {
            "proc/self/cgroup": "4:memory:/a\n0::/u\n",
            "proc/self/mountinfo": V1_MOUNTS + UNIFIED,
            "memory/a/memory.limit_in_bytes": str(300 * MB),
            "unified/u/cpu.max": "200000 100000",
        },
        (2.0, 300 * MB, None),
        {},
    ),
    "a container on v1, whose group is at the top of the mount": (
        _v1("/docker/abc/inner", IN_CONTAINER)
        | {
            "memory/memory.limit_in_bytes": str(750 * MB),
            "memory/inner/memory.limit_in_bytes": UNLIMITED_V1,
        },
        (8, 750 * MB, None),
        {"memory_bytes": "cgroup v1 memory.limit_in_bytes at /"},
    ),
    # Nested containers: the path is from another name space's point of view.
    **{
        f"{path}, outside of what is mounted": (
            _v2(path) | {"memory.max": str(GB)},
            (8, GB, None),
            {"memory_bytes": "cgroup v2 memory.max at /"},
        )
        for path in ("/../../outer", "/not/mounted/here")
    },
    "above the machine": (
        _v2("/") | {"memory.max": str(64 * GB)},
        (8, 16 * GB, None),
        {"memory_bytes": "machine"},
    ),
}


@pytest.mark.parametrize(("files", "found", "sources"), TREES.values(), ids=TREES)
def test_the_smallest_limit_of_all_levels_is_read(
    tree: Callable[[Files], str],
    files: Files,
    found: tuple[float, int, int | None],
    sources: dict[str, str],
) -> None:
    limits = read_limits(tree(files))
    assert (limits.cpus, limits.memory_bytes, limits.pids) == found
    assert limits.sources.items() >= sources.items()


def test_without_proc_the_machine_is_asked(tmp_path: Path, tree: Callable[[Files], str]) -> None:
    limits = read_limits(str(tmp_path))
    assert limits.memory_bytes == limits.machine_memory_bytes > 0
    assert free_memory_bytes(str(tmp_path)) is None
    limits = read_limits(tree({}), affinity=2)
    assert (limits.cpus, limits.sources["cpus"]) == (2, "sched_getaffinity")
    limits = read_limits()
    assert 0 < limits.cpus <= (os.cpu_count() or 1)
    assert 0 < limits.memory_bytes <= limits.machine_memory_bytes


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 * GB),
        (
            _v1("/job")
            | {
                "memory/job/memory.limit_in_bytes": str(750 * MB),
                "memory/job/memory.usage_in_bytes": str(700 * MB),
                "memory/job/memory.stat": f"total_inactive_file {150 * MB}\n"
                f"total_active_file {50 * MB}\n",
            },
            250 * MB,
        ),
        (
            _v2("/outer/inner")
            | {
                "outer/memory.max": str(500 * MB),
                "outer/memory.current": str(600 * MB),  # the kernel is about to act
                "outer/inner/memory.max": str(400 * MB),
                "outer/inner/memory.current": str(100 * MB),
            },
            0,
        ),
    ],
    ids=["the machine's", "with the page cache of a v1 group", "the least of all levels of v2"],
)
def test_what_is_available(tree: Callable[[Files], str], files: Files, available: int) -> None:
    assert available_memory_bytes(tree(files)) == available


def test_what_a_server_may_use_is_bounded_by_its_own_group_too(
    tree: Callable[[Files], str],
) -> None:
    held = {"memory.max": str(400 * MB), "memory.current": str(100 * MB)}
    files = {f"openenvd/echo/{name}": text for name, text in held.items()}
    root = tree(_v2("/openenvd/echo") | files)
    assert free_memory_bytes(root) == 300 * MB
    assert available_memory_bytes(root) == 8 * GB  # to others: that limit is our own doing


# What is said when the system refuses one more process: which limit, and how much of it is used.


def test_the_limit_with_least_room_is_reported_if_any(tree: Callable[[Files], str]) -> None:
    files = {"pids/a/pids.max": "max", "pids/a/pids.current": "298"}
    assert process_room(tree(_v1("/a/b") | files)) is None
    counts = {"pids/a/pids.max": "300", "pids/a/pids.current": "298"}
    below = {"pids/a/b/pids.max": "64", "pids/a/b/pids.current": "10"}
    room = process_room(tree(_v1("/a/b") | counts | below))
    assert room == ProcessRoom(300, 298, "cgroup v1 pids.max at /a")
    assert room.left == 2
    assert room.sentence() == (
        "298 of 300 processes and threads are in use (cgroup v1 pids.max at /a)"
    )


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


def test_other_reasons_are_reported_unchanged_and_a_shim_names_the_limit() -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert why_not_started(missing) == "No such file or directory (FileNotFoundError)"
    assert not tells_no_room(why_not_started(missing))
    assert why_no_server(REFUSED).startswith(NO_ROOM)
    assert why_no_server(OSError(errno.EACCES, "denied", "/x")) == "denied: /x"
