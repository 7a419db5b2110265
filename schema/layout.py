# SPDX-License-Identifier: Apache-2.0
"""The paths below the daemon's home. Folders are 0700, files 0600.

    home/run/<replica>/replica.json        the run file, written before the replica is started
    home/run/<replica>/imports/<package>   a link to an upstream project, under its import name
    home/logs/environments/<name>/         one log per replica; they outlive it
    home/sockets/<digest>.sock             the shim of one replica; all sockets lie elsewhere when
                                           the home's path is long (`Layout.sockets`)
    home/sockets/<digest>-<number>.door    receives connections that other replicas pass on
    home/sockets/agent-<key>.sock          the agent of an engine; its key: agent_client.py
    home/engines/<key>/                    its address, its locks, and its last observations
    home/home-id                           the name of this home on engines
    home/logs/agent-<key>.log              the agent's log
    home/venvs/<key>/                      the virtual environment of an upstream project
    home/reserve                           room that `prune` and `down` free on a full disk

`server.settings.Paths` adds what is the daemon's alone. Standard library alone: it is imported with
every command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 103  # `sun_path` holds 108 bytes on Linux, 104 on macOS, with its zero
_MAX_SOCKET_NAME = 40
_DIGEST_LENGTH = 12
GATEWAY = "gateway"  # the folder of the home's gateway among those of replicas


class Layout:
    """The folders of one daemon, as far as environments are concerned."""

    def __init__(self, home: Path) -> None:
        digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:_DIGEST_LENGTH]
        self.home = home
        self.runs = home / "run"  # a folder for each replica, with its run file
        self.venvs = home / "venvs"  # the virtual environments of projects
        self.environment_logs = home / "logs" / "environments"  # a folder for each environment
        self.engines = home / "engines"  # a folder for each engine that this home has used
        self.replica_groups = f"replicas-{digest}"  # their cgroups: `openenvd/<this>/<replica>`
        self.sockets = home / "sockets"  # or a short private folder, when that is too long a path
        if len(os.fsencode(self.sockets)) + _MAX_SOCKET_NAME > MAX_SOCKET_PATH_BYTES:
            self.sockets = Path(tempfile.gettempdir()) / f"openenvd-{os.getuid()}-{digest}"

    def agent_socket(self, key: str) -> Path:
        """The socket of an engine's agent."""
        return self.sockets / f"agent-{key}.sock"

    def agent_log(self, key: str) -> Path:
        """The log of an engine's agent."""
        return self.home / "logs" / f"agent-{key}.log"

    @property
    def home_label(self) -> str:
        """The name of this home on an engine, which other machines and users may use, too.

        It is random, drawn at its first use, and kept in the home, because the names of machines,
        users and folders change.
        """
        path = self.home / "home-id"
        if not path.exists():
            create_whole(path, os.urandom(_DIGEST_LENGTH // 2).hex().encode())
        return path.read_text()

    def run_dir(self, replica_id: str) -> Path:
        """The folder of one replica's run file."""
        return self.runs / replica_id

    def replica_log(self, environment: str, replica_id: str) -> Path:
        """The log of one replica."""
        return self.environment_logs / environment / f"{replica_id}.log"

    def replica_socket(self, replica_id: str) -> Path:
        """Return a path with a digest, since a replica's id can be too long for a socket's path."""
        return self.sockets / f"{_digest(replica_id)}.sock"

    def doors(self, environment: str) -> str:
        """Return the beginning of control sockets' paths, before a replica's number and `.door`."""
        return f"{self.sockets}/{_digest(environment)}-"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def create_whole(path: Path, content: bytes) -> None:
    """Make a file, which appears whole; one that is there, or that is made meanwhile, stays."""
    descriptor, made = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)  # noqa: PTH108  at once


def socket_folders_outside() -> list[Path]:
    """The folders of sockets of this user's homes whose paths are long, of this and other homes."""
    pattern = f"openenvd-{os.getuid()}-{'[0-9a-f]' * _DIGEST_LENGTH}"
    return sorted(Path(tempfile.gettempdir()).glob(pattern))


def make_private(folder: Path) -> Path:
    """Make the folder, readable by its owner alone, unless it exists; returns it.

    It may be a symlink that this user or the administrator has made. Raises `PermissionError`: it
    belongs to another user, who could read or replace what is in it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.lstat().st_uid not in (0, os.getuid()):
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def make_private_in_shared(folder: Path) -> None:
    """Make a private folder where others can make files, too, unless it exists.

    Raises `OSError`: it cannot be made, or is not private (`check_private`).
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check that a path is a folder, and no symlink, where this user alone can make files.

    Raises `FileNotFoundError`: it does not exist; `PermissionError`: it is anything else.
    """
    found = folder.lstat()
    is_own_folder = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own_folder or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is not a folder that this user alone can write to")
