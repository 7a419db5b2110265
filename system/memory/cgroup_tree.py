# SPDX-License-Identifier: Apache-2.0
"""Locates this process in the control group trees: v1, v2, or both at once (hybrid).

`locate` reads the group from `/proc/self/cgroup`, and the mount point and root of its tree from
`/proc/self/mountinfo` (in a container the mount shows only a subtree). Every path can be read below
another root, so that tests use trees of files.

`free_memory_bytes` is the memory that the groups and the machine leave to this process. The page
cache counts as free, because the kernel drops it before it kills. Light: a shim imports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .cgroups import Cgroup

V1 = 1
V2 = 2

_READ_BYTES = 65536

# v1 shows "no limit" as the largest page-aligned number; v2 says `max`.
UNLIMITED_BYTES = 1 << 60
# v2 slows a group down above `memory.high` almost to a stop, so plans treat that as a limit.
LIMIT_FILES_V2 = ("memory.max", "memory.high")
LIMIT_FILES_V1 = ("memory.limit_in_bytes",)
_CACHE_KEYS_V2 = ("active_file", "inactive_file")
_CACHE_KEYS_V1 = ("total_active_file", "total_inactive_file")

TOP = "openenvd"  # the parent of our own groups (`cgroups.py`)


class Location(NamedTuple):
    """A group of one hierarchy."""

    version: int
    mount_point: str  # as seen from the root that was given
    path: str  # below the mount point: `/` or `/a/b`

    @property
    def directory(self) -> str:
        """The folder of the group."""
        return join(self.mount_point, self.path)

    def outside_ours(self) -> Location:
        """The group above `openenvd`, if the process is in a group that we made."""
        parts = self.path.split("/")
        if TOP not in parts:
            return self
        return self._replace(path="/".join(parts[: parts.index(TOP)]) or "/")

    def levels(self) -> list[Location]:
        """This group and every one above it that can be seen, nearest first."""
        found = [self]
        path = self.path
        while path != "/":
            path = os.path.dirname(path)  # noqa: PTH120 (pathlib costs a shim 0.7 MB)
            found.append(self._replace(path=path))
        return found


def locate(controller: str, root: str = "") -> Location | None:
    """Return the group that holds this process for `controller`; None when there is none here.

    A controller is in one hierarchy at a time: where v1 has it, v2 does not.
    """
    groups: dict[str, str] = {}  # by controller, of lines such as `4:memory:/a/b`; v2 has none
    for line in (read_text(f"{root}/proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups.update((name, path or "/") for name in controllers.split(","))
    mounts = _mounts(read_text(f"{root}/proc/self/mountinfo") or "")
    for name in (controller, ""):  # "" stands for the v2 hierarchy
        if name in groups and name in mounts:
            mounted_from, mount_point = mounts[name]
            path = _inside(groups[name], mounted_from)
            version = V1 if name else V2
            location = Location(version, root + mount_point, path)
            if os.path.isdir(location.directory):  # noqa: PTH112
                return location
            return location._replace(path="/")  # the group is outside the mounted subtree
    return None


def visible_groups(
    controller: str, root: str = "", *, outside_ours: bool = False
) -> list[Location]:
    """Return this process's group and all above it, nearest first; `outside_ours`: not our own."""
    own = locate(controller, root)
    if own is None:
        return []
    return (own.outside_ours() if outside_ours else own).levels()


def read_text(path: str) -> str | None:
    """Return a small file's text; None when it cannot be read.

    Every shim reads such files again and again: `open` costs three times as much.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return b"".join(iter(lambda: os.read(fd, _READ_BYTES), b"")).decode(errors="replace")
    except OSError:
        return None
    finally:
        os.close(fd)


def read_keyed(path: str, key: str) -> int | None:
    """Return the number after `key` in a file of `key number` lines, such as `memory.events`."""
    _, _, rest = f"\n{read_text(path) or ''}".partition(f"\n{key} ")
    value = rest.partition("\n")[0].strip()
    return int(value) if value.isdigit() else None


def level_number(level: Location | Cgroup, name: str) -> int | None:
    """Return the number in a group's file; None when it is missing, or says `max` or -1."""
    text = (read_text(f"{level.directory}/{name}") or "").strip()
    return int(text) if text.isdigit() else None


def join(directory: str, path: str) -> str:
    """Join `directory` and an absolute `path` below it."""
    return directory.rstrip("/") + path.rstrip("/") or "/"


def free_memory_bytes(root: str = "") -> int | None:
    """Return the memory that its groups and the machine leave to this process; None: unknown."""
    left = left_in_groups(visible_groups("memory", root))
    found = [machine_memory_bytes("MemAvailable", root), *left]
    return min((each for each in found if each is not None), default=None)


def machine_memory_bytes(key: str, root: str = "") -> int | None:
    """Return the machine's `MemTotal` or `MemAvailable`; None if unknown."""
    for line in (read_text(f"{root}/proc/meminfo") or "").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def left_in_groups(levels: Iterable[Location]) -> Iterator[int]:
    """Yield what each group that has a limit may still use."""
    for level in levels:
        is_v1 = level.version == V1
        numbers = [level_number(level, n) for n in (LIMIT_FILES_V1 if is_v1 else LIMIT_FILES_V2)]
        limits = [number for number in numbers if number and number < UNLIMITED_BYTES]
        used = level_number(level, "memory.usage_in_bytes" if is_v1 else "memory.current")
        if limits and used is not None:
            stat = f"{level.directory}/memory.stat"
            keys = _CACHE_KEYS_V1 if is_v1 else _CACHE_KEYS_V2
            cached = sum(read_keyed(stat, key) or 0 for key in keys)
            yield max(0, min(limits) - used + cached)


def _mounts(text: str) -> dict[str, tuple[str, str]]:
    """Map controllers to (group at the mount's top, mount point); see proc_pid_mountinfo(5)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        where = (_unescape(fields[3]), _unescape(fields[4]))
        if kind[0] == "cgroup2":
            mounts.setdefault("", where)
        elif kind[0] == "cgroup":
            mounts.update((name, where) for name in kind[-1].split(","))
    return mounts


def _inside(group: str, mounted_from: str) -> str:
    """Return the group's path below a mount that shows the tree from `mounted_from` on."""
    if mounted_from == "/":
        return group if ".." not in group.split("/") else "/"
    if group == mounted_from:
        return "/"
    if group.startswith(mounted_from + "/"):
        return group[len(mounted_from) :]
    return "/"


def _unescape(text: str) -> str:
    """Replace octal escapes, as mountinfo writes blanks."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
