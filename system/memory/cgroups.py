# SPDX-License-Identifier: Apache-2.0
"""One memory cgroup per worker or replica, where the system allows one.

    <own group>/openenvd/<manager's name>/<group's name>        for instance
    /user.slice/…/openenvd/replicas-51fe…/echo-0-7f3a

`<own group>` is the caller's group up to `openenvd`: a shim that a capped worker starts makes its
groups beside the worker's, not below it, so that the worker's cap does not apply to them.

v1 needs a writable memory hierarchy. v2 needs a delegated group without processes of its own: our
own group is tried first (its processes are moved into a leaf, if all of them are ours), then the
groups above it. If there is none, `why_not` has the reason, and callers do without.

Sizes are bytes. Light: a shim imports it, hence no dataclasses and no pathlib.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from typing import Any

from ..process.proc import read_stat
from ..process.process_identity import ProcessIdentity
from .cgroup_tree import (
    TOP,
    UNLIMITED_BYTES,
    V1,
    V2,
    Location,
    level_number,
    locate,
    read_keyed,
    read_text,
    visible_groups,
)

_LEAF = "home"  # to which a delegated v2 group's own processes move
_SERVER_LEAF = "host"  # to which a server moves that makes groups below its own
_KILL_ROUNDS = 50  # after these, a group that still forks is left to the caller
_UNLIMITED_V1 = -1  # v1 shows "no limit" as a huge number and takes -1 for it


class Cgroup:
    """One group. Every reader returns None or 0 once the group is gone."""

    __slots__ = ("directory", "name", "version")

    def __init__(self, directory: str, name: str, version: int) -> None:
        self.directory = directory
        self.name = name  # for people: `openenvd/long-3`
        self.version = version

    def __repr__(self) -> str:
        return f"Cgroup({self.name!r})"

    def add(self, pid: int) -> None:
        """Move a process in; its later forks start inside. Raises `OSError`: it cannot be moved."""
        _write(f"{self.directory}/cgroup.procs", str(pid))

    def set_limit(self, limit_bytes: int | None) -> None:
        """Cap memory and swap together: a process over its share is ended, not swapped out.

        Raises `OSError` when the kernel refuses (v1: more is in use than it can reclaim).
        """
        if self.version == V1:
            value = str(_UNLIMITED_V1 if limit_bytes is None else limit_bytes)
            memory_and_swap = f"{self.directory}/memory.memsw.limit_in_bytes"
            # The kernel holds memory ≤ memory+swap at every moment: raising starts with the latter,
            # lowering with the former. Trying the one first and last covers both.
            with contextlib.suppress(OSError):
                _write(memory_and_swap, value)
            _write(f"{self.directory}/memory.limit_in_bytes", value)
            with contextlib.suppress(OSError):  # no swap accounting
                _write(memory_and_swap, value)
            return
        _write(f"{self.directory}/memory.max", "max" if limit_bytes is None else str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap accounting
            _write(f"{self.directory}/memory.swap.max", "max" if limit_bytes is None else "0")

    def oom_kills(self) -> int:
        """Return how many processes of the group the kernel has killed for memory, ever."""
        return self.counted_kills() or 0

    def counted_kills(self) -> int | None:
        """Return the number of kills; None if they are not counted: in the root, or when gone."""
        name = "memory.oom_control" if self.version == V1 else "memory.events"
        return read_keyed(f"{self.directory}/{name}", "oom_kill")

    def limit_bytes(self) -> int | None:
        """Return its own limit; None if it has none, even if a group above it has one."""
        name = "memory.limit_in_bytes" if self.version == V1 else "memory.max"
        limit = level_number(self, name)
        return limit if limit is not None and limit < UNLIMITED_BYTES else None

    def peak_bytes(self) -> int | None:
        """Return the most memory that the group ever used (v2: since Linux 5.19)."""
        name = "memory.max_usage_in_bytes" if self.version == V1 else "memory.peak"
        return level_number(self, name)

    def reset_peak(self) -> bool:
        """Reset the peak (v1; on v2 it is each reader's own since Linux 6.12: False)."""
        if self.version != V1:
            return False
        with contextlib.suppress(OSError):
            _write(f"{self.directory}/memory.max_usage_in_bytes", "0")
            return True
        return False

    def held_bytes(self) -> int | None:
        """Return the group's present memory without the page cache, which can be dropped."""
        is_v1 = self.version == V1
        current = level_number(self, "memory.usage_in_bytes" if is_v1 else "memory.current")
        cached = read_keyed(f"{self.directory}/memory.stat", "total_cache" if is_v1 else "file")
        return None if current is None else max(0, current - (cached or 0))

    def pids(self) -> list[int]:
        """Return the pids of the processes inside."""
        return _pids_in(self.directory)

    def kill(self) -> None:
        """Send SIGKILL to everything inside; returns when no process is left, or after a bound."""
        with contextlib.suppress(OSError):
            if self.version == V2:
                _write(f"{self.directory}/cgroup.kill", "1")  # since Linux 5.14, atomic
                return
        for _ in range(_KILL_ROUNDS):
            living = [pid for pid in self.pids() if self._kill_member(pid)]
            if not living:
                return

    def _kill_member(self, pid: int) -> bool:
        """Kill `pid` if it still lives in this group; returns whether it did."""
        with contextlib.suppress(OSError):
            identity = ProcessIdentity.of(pid)
            stat = read_stat(pid)
            # Read again after the identity was taken: a pid reused since is not a member.
            if stat is not None and not stat.is_dead and pid in self.pids():
                return identity.signal(signal.SIGKILL)
        return False

    def remove_with_children(self) -> bool:
        """Remove the group and those below it, which a server has made for its sessions.

        Do not use it for a group in which others make groups: an empty one may be about to be used.
        """
        with contextlib.suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.is_dir():
                    Cgroup(entry.path, entry.name, self.version).remove_with_children()
        return self.remove()

    def remove(self) -> bool:
        """Remove the group; False while processes are inside. Removing twice is fine."""
        try:
            os.rmdir(self.directory)  # noqa: PTH106
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def exists(self) -> bool:
        """Return whether the group has not been removed."""
        return os.path.isdir(self.directory)  # noqa: PTH112

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, from which `from_json` finds the group after a restart."""
        return {"directory": self.directory, "name": self.name, "version": self.version}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cgroup:
        """Return the group that `to_json` wrote; it may be gone by now (`exists`)."""
        return cls(data["directory"], data["name"], data["version"])


class _GroupMaker:
    """Makes groups below `directory`; when `available` is False, `why_not` says why.

    `root` stands before every path (tests).
    """

    available = False
    why_not = ""
    directory = ""
    _version = 0

    def __init__(self, *, root: str = "") -> None:
        for _ in range(3):  # a process that leaves may remove an empty level meanwhile
            own = locate("memory", root)
            if own is None:
                self.why_not = "no cgroup hierarchy with a memory controller is mounted"
                return
            self._version = own.version
            try:
                self._open(own)
                self.why_not = "" if self.available else self.why_not
                return
            except OSError as exc:
                self.why_not = f"{exc.filename or 'the control groups'}: {exc.strerror}"
                if not isinstance(exc, FileNotFoundError):
                    return

    def _open(self, own: Location) -> None:
        """Find or make the directory, for a process in the group `own`."""
        raise NotImplementedError


class CgroupManager(_GroupMaker):
    """Makes groups below `<own group>/openenvd/<name>`; see the module's docstring."""

    def __init__(self, name: str, *, root: str = "") -> None:
        self.name = name
        super().__init__(root=root)

    def create(self, name: str, limit_bytes: int | None = None) -> Cgroup:
        """Make a group, or take over the one of that name. Limits are set before it is used.

        Raises `OSError` when the group cannot be made, or the manager is not `available`.
        """
        if not self.available:
            raise OSError(errno.ENOTSUP, f"no memory cgroups here: {self.why_not}")
        return _make_group(self.group(name), limit_bytes, kill_together=False)

    def group(self, name: str) -> Cgroup:
        """Return the group of that name, which need not exist."""
        return Cgroup(f"{self.directory}/{name}", f"{TOP}/{name}", self._version)

    def remove(self) -> bool:
        """Remove the empty groups below, then the manager's own; False while some are in use."""
        if not self.directory:
            return True
        Cgroup(self.directory, self.name, self._version).remove_with_children()
        return self._remove_own()

    def _remove_own(self) -> bool:
        top = os.path.dirname(self.directory)  # noqa: PTH120
        removed = Cgroup(self.directory, self.name, self._version).remove()
        Cgroup(top, TOP, self._version).remove()  # stays while another manager has groups there
        return removed

    def leave(self, cgroup: Cgroup) -> None:
        """Move this process from `cgroup` back above `openenvd`, and remove the empty group.

        v2 forbids the move: there the group stays. Other groups are not touched, even empty ones,
        since a process may be about to enter.
        """
        if self._version == V1:
            base = os.path.dirname(os.path.dirname(self.directory))  # noqa: PTH120
            with contextlib.suppress(OSError):
                _write(f"{base}/cgroup.procs", str(os.getpid()))
        if cgroup.remove():
            self._remove_own()

    def _open(self, own: Location) -> None:
        own = own.outside_ours()
        base = own.directory if own.version == V1 else self._delegated(own)
        if base is None:
            return
        levels = (f"{base}/{TOP}", f"{base}/{TOP}/{self.name}")
        for directory in levels:
            _make(directory)
            if own.version == V2:
                _hand_down(directory)
        self.directory = levels[-1]
        self.available = True

    def _delegated(self, own: Location) -> str | None:
        """Return the nearest writable v2 group that can delegate the memory controller."""
        if "memory" not in (read_text(f"{own.directory}/cgroup.controllers") or "").split():
            self.why_not = f"cgroup v2 {own.path} has no memory controller to hand down"
            return None
        self.why_not = f"cgroup v2 {own.path} is not delegated to this user"
        for level in own.levels():
            if not os.access(f"{level.directory}/cgroup.procs", os.W_OK):
                return None
            if _may_hand_down(level.directory):
                self.why_not = ""
                return level.directory
        return None


def own_group(*, is_ours: bool) -> Cgroup | None:
    """Return this process's memory cgroup, or None if the kernel does not count its kills.

    `is_ours`: only a group that we made, or one below it; other processes share all other groups.
    """
    found = locate("memory")
    if found is None or (is_ours and found.outside_ours() == found):
        return None
    name = found.path.removeprefix(found.outside_ours().path).strip("/") or found.path
    group = Cgroup(found.directory, name, found.version)
    return None if group.counted_kills() is None else group


def existing_groups(pattern: str) -> list[Cgroup]:
    """Find groups `openenvd/<pattern>` below this process's group, without making any."""
    import glob  # shims do not need it

    found: list[Cgroup] = []
    for level in visible_groups("memory", outside_ours=True):
        for directory in glob.glob(f"{glob.escape(level.directory)}/{TOP}/{pattern}/"):  # noqa: PTH207
            name = directory[len(level.directory) :].strip("/")
            found.append(Cgroup(directory.rstrip("/"), name, level.version))
    return found


class GroupsBelow(_GroupMaker):
    """Makes groups below this process's own group, which was made for this process only.

    On v2 a group with processes cannot delegate the memory controller, so this process moves into a
    leaf.
    """

    def create(self, name: str, limit_bytes: int) -> Cgroup:
        """Make a group with a limit; on v2 the kernel kills all of its processes together.

        Raises `OSError` if it cannot be made, and leaves nothing of it.
        """
        cgroup = Cgroup(f"{self.directory}/{name}", name, self._version)
        try:
            return _make_group(cgroup, limit_bytes, kill_together=True)
        except OSError:
            cgroup.remove()
            raise

    def _open(self, own: Location) -> None:
        self.directory = own.directory
        if own.version == V2:
            if own.outside_ours() == own:
                self.why_not = f"cgroup v2 {own.path} is not this server's alone"
                return
            leaf = f"{self.directory}/{_SERVER_LEAF}"
            _make(leaf)
            _write(f"{leaf}/cgroup.procs", str(os.getpid()))
            _hand_down(self.directory)
        self.create(f"probe-{os.getpid()}", 2**30).remove()
        self.available = True


def _make_group(cgroup: Cgroup, limit_bytes: int | None, *, kill_together: bool) -> Cgroup:
    """Make a group; `kill_together` (v2): if the kernel kills one process, it kills all of it."""
    _make(cgroup.directory)
    cgroup.set_limit(limit_bytes)
    if cgroup.version == V2:
        with contextlib.suppress(OSError):
            _write(f"{cgroup.directory}/memory.oom.group", "1" if kill_together else "0")
    return cgroup


def _may_hand_down(directory: str) -> bool:
    """Return whether children of this v2 group get the memory controller; empty it if needed."""
    if not os.access(directory, os.W_OK):
        return False
    try:
        _hand_down(directory)
    except OSError as exc:
        return exc.errno == errno.EBUSY and _move_into_leaf(directory)
    return True


def _hand_down(directory: str) -> None:
    if "memory" not in (read_text(f"{directory}/cgroup.subtree_control") or "").split():
        _write(f"{directory}/cgroup.subtree_control", "+memory")


def _move_into_leaf(directory: str) -> bool:
    """Empty a v2 group into a child of its own, if all of its processes are ours.

    This is so in a service with `Delegate=yes`; a terminal's scope, which has the user's shell, is
    left alone.
    """
    pids = _pids_in(directory)
    if not all(map(_is_ours, pids)):
        return False
    try:
        _make(f"{directory}/{TOP}")
        _make(f"{directory}/{TOP}/{_LEAF}")
        for pid in pids:
            _write(f"{directory}/{TOP}/{_LEAF}/cgroup.procs", str(pid))
        _hand_down(directory)
    except OSError:
        return False
    return True


def _pids_in(directory: str) -> list[int]:
    return [int(line) for line in (read_text(f"{directory}/cgroup.procs") or "").split()]


def _is_ours(pid: int) -> bool:
    """Return whether `pid` is this process or descends from it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        stat = read_stat(pid)
        if stat is None:
            return True  # it has ended
        pid = stat.parent
    return False


def _make(directory: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)  # noqa: PTH102


def _write(path: str, text: str) -> None:
    # Not through a buffer: the kernel's answer must come with this write. Never O_CREAT: a
    # control file that is missing must be an error.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc
    finally:
        os.close(fd)
