# SPDX-License-Identifier: Apache-2.0
"""A memory cap for each isolated session: a cgroup below the replica's own, where there is one.

    /…/openenvd/replicas/my_env-0-7f3a            the replica's, made by its shim
    /…/openenvd/replicas/my_env-0-7f3a/session-5  one session's, made here before it is forked

v1 needs a writable memory hierarchy. On v2 a group with processes hands no memory controller down,
so the host moves itself into a leaf first; that works where the group is the replica's alone.
Where neither is to be had, the host looks at what the session holds four times a second.
"""

from __future__ import annotations

import contextlib
import os
import re

V1, V2 = 1, 2
_LEAF = "host"
_SESSION = re.compile(r"session-(\d+)-\d+")
_ESCAPE = re.compile(r"\\([0-7]{3})")


class SessionGroup:
    """One session's group."""

    def __init__(self, directory: str, version: int, limit_bytes: int) -> None:
        """
        Raises:
            OSError: it cannot be made.
        """
        self.directory = directory
        self._version = version
        os.mkdir(directory)  # noqa: PTH102  here and below: pathlib costs each process memory
        try:
            self._set_limit(limit_bytes)
        except OSError:
            self.remove()
            raise

    def enter(self) -> None:
        """Move this process in."""
        _write(f"{self.directory}/cgroup.procs", "0")

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed for memory."""
        name = "memory.oom_control" if self._version == V1 else "memory.events"
        for line in _lines(f"{self.directory}/{name}"):
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def peak_bytes(self) -> int | None:
        """Most memory it ever held."""
        name = "memory.max_usage_in_bytes" if self._version == V1 else "memory.peak"
        lines = _lines(f"{self.directory}/{name}")
        return int(lines[0]) if lines and lines[0].isdigit() else None

    def remove(self) -> None:
        """Remove it; what a killed process left inside is the shim's to find."""
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)  # noqa: PTH106

    def _set_limit(self, limit_bytes: int) -> None:
        text = str(limit_bytes)
        if self._version == V1:
            _write(f"{self.directory}/memory.limit_in_bytes", text)
            with contextlib.suppress(OSError):  # no swap accounting
                _write(f"{self.directory}/memory.memsw.limit_in_bytes", text)
            return
        _write(f"{self.directory}/memory.max", text)
        with contextlib.suppress(OSError):
            _write(f"{self.directory}/memory.swap.max", "0")
            _write(f"{self.directory}/memory.oom.group", "1")


class SessionGroups:
    """Makes the groups. Opened in the host, before it has forked anything."""

    def __init__(self) -> None:
        self.why_not = ""
        self._version, self._directory = 0, ""
        try:
            self._version, self._directory = _open()
            _sweep(self._directory)
        except OSError as exc:
            self.why_not = f"{exc.filename or 'control groups'}: {exc.strerror}"

    @property
    def are_available(self) -> bool:
        return bool(self._directory)

    def create(self, number: int, limit_bytes: int) -> SessionGroup:
        """The group of one session.

        Raises:
            OSError: it cannot be made.
        """
        name = f"session-{os.getpid()}-{number}"
        return SessionGroup(f"{self._directory}/{name}", self._version, limit_bytes)


def _open() -> tuple[int, str]:
    """Version and folder of our own group, ready to have children."""
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in _lines("/proc/self/cgroup")}
    for controllers, path in own.items():
        if "memory" in controllers.split(","):
            return V1, _probe(_mounted("cgroup", path, "memory"))
    if "" not in own:
        raise OSError(2, "no memory controller", "/proc/self/cgroup")
    directory = _mounted("cgroup2", own[""], "")
    if "openenvd" not in own[""]:
        raise OSError(1, "the group is not the replica's alone", directory)
    _make_way(directory)
    return V2, _probe(directory)


def _mounted(kind: str, path: str, option: str) -> str:
    """Where the group `path` is seen in the file system."""
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, described = before.split(" "), after.split(" ")
        options = described[2].split(",") if len(described) > 2 else []
        if described[0] != kind or (option and option not in options):
            continue
        root, point = _plain(fields[3]), _plain(fields[4])
        if path == root or path.startswith(root.rstrip("/") + "/"):
            rest = path[len(root.rstrip("/")) :]
            return f"{point.rstrip('/')}{rest}".rstrip("/")
    raise OSError(2, f"no {kind} hierarchy is mounted", path)


def _sweep(directory: str) -> None:
    """Remove what hosts that were killed have left, where no shim does."""
    for name in os.listdir(directory):  # noqa: PTH208
        match = _SESSION.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):  # noqa: PTH110
            with contextlib.suppress(OSError):
                os.rmdir(f"{directory}/{name}")  # noqa: PTH106


def _probe(directory: str) -> str:
    """The folder, when groups with limits can be made in it."""
    trial = SessionGroup(f"{directory}/probe-{os.getpid()}", *_trial_limit(directory))
    trial.remove()
    return directory


def _trial_limit(directory: str) -> tuple[int, int]:
    is_v2 = os.path.exists(f"{directory}/cgroup.controllers")  # noqa: PTH110
    return (V2 if is_v2 else V1), 2**30


def _make_way(directory: str) -> None:
    """v2: this process into a leaf, then the controller handed down."""
    leaf = f"{directory}/{_LEAF}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf)  # noqa: PTH102
    _write(f"{leaf}/cgroup.procs", "0")
    _write(f"{directory}/cgroup.subtree_control", "+memory")


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc
    finally:
        os.close(fd)
