# SPDX-License-Identifier: Apache-2.0
"""Run files: each records one replica before it is started, so that every process finds it.

One folder per local replica below `runs`, with the run file that its shim reads
(`shim`). A replica exists as long as its folder does: stopping it removes the
folder last, so that no crash in between can lose one.

Used by launches and `down` (in workers) and by the daemon's reconciler, at the same time if it
must be: everything here tolerates that the other one was faster. Functions that block say so.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shim.client import ShimClient, ShimGone, clean_up_after_shim, read_run_file, start_shim
from ..shim.files import RUN_FILE_NAME
from ..system.descriptors import close_all
from ..system.listening_sockets import open_listening_sockets

Json = dict[str, Any]

# What a server needs to be started again, its program and configuration, is of this version. Those
# of earlier ones are adopted while they run, and stopped, but not started again.
RUN_FILE_VERSION = 2
GRACE_SECONDS = 5.0  # for sessions to end, between SIGTERM and SIGKILL
_MARGIN_SECONDS = 5.0  # beyond the grace, for the shim to kill, collect and say so


@dataclass(frozen=True, slots=True)
class RunFile:
    """One replica that was (or is being) started."""

    replica_id: str
    environment: str
    ordinal: int
    run_dir: Path
    socket_path: str
    log_path: str
    host: str
    port: int
    request_id: str  # the launch it belongs to
    data: Json  # everything that its shim reads

    @property
    def address(self) -> str:
        """What goes into upstream's `base_url`."""
        return address_of(self.host, self.port)

    @property
    def token(self) -> str | None:
        """What its clients must send."""
        return self.data.get("token")

    @property
    def created_at(self) -> float:
        """When it was written: another attempt of the same launch writes another."""
        return float(self.data.get("created_at", 0.0))

    @property
    def is_restartable(self) -> bool:
        """Whether this version of openenvd can start its server again."""
        return bool(self.data.get("version") == RUN_FILE_VERSION)

    @classmethod
    def of(cls, run_dir: Path, data: Json) -> RunFile:
        """The replica that `data` describes."""
        fields: Json = {key: data.get(key) for key in cls.__dataclass_fields__}
        return cls(**{**fields, "run_dir": run_dir, "data": data})


def read(run_dir: Path) -> RunFile | None:
    """The replica of a folder; None when there is none, or none that can be read."""
    data = read_run_file(run_dir)
    if data is None or data.get("version") not in range(1, RUN_FILE_VERSION + 1):
        return None
    return RunFile.of(Path(run_dir), data)


def all_of(runs: Path) -> list[RunFile]:
    """Every replica below a folder, by environment and ordinal."""
    return _read_all(runs, "")


def of_environment(runs: Path, name: str) -> list[RunFile]:
    """The replicas of one environment, by ordinal."""
    # A replica's id begins with its environment's name: other folders are not even opened.
    return [run_file for run_file in _read_all(runs, f"{name}-") if run_file.environment == name]


def _read_all(runs: Path, prefix: str) -> list[RunFile]:
    try:
        folders = [folder for folder in runs.iterdir() if folder.name.startswith(prefix)]
    except FileNotFoundError:
        return []
    found = [run_file for folder in folders if (run_file := read(folder)) is not None]
    return sorted(found, key=lambda r: (r.environment, r.ordinal, r.replica_id))


def stop_environment(runs: Path, name: str, grace_seconds: float = GRACE_SECONDS) -> list[str]:
    """Stop all replicas of an environment, at once rather than in turn; their ids. Blocks."""
    run_files = of_environment(runs, name)
    stop_replicas([run_file.run_dir for run_file in run_files], grace_seconds)
    return [run_file.replica_id for run_file in run_files]


def stop_replica(run_dir: Path, grace_seconds: float = GRACE_SECONDS) -> None:
    """Stop one replica and remove its folder; nothing of it is left running. Blocks."""
    stop_replicas([run_dir], grace_seconds)


def stop_replicas(run_dirs: Iterable[Path], grace_seconds: float = GRACE_SECONDS) -> None:
    """Stop replicas side by side. Stopping what is stopped already is fine. Blocks."""
    asked = [(Path(run_dir), _ask_to_stop(Path(run_dir), grace_seconds)) for run_dir in run_dirs]
    deadline = time.monotonic() + grace_seconds + _MARGIN_SECONDS
    for run_dir, link in asked:
        if link is not None:
            _await_end(link, max(0.0, deadline - time.monotonic()))
        # Also after an orderly end: it costs two reads, and nothing it names can be alive then.
        clean_up_after_shim(run_dir, grace_seconds=0.0)
        _remove(run_dir)


def revive(run_file: RunFile) -> None:
    """A new shim in place of one that was killed, on the environment's own sockets. Blocks.

    Without a sibling to get the sockets from, the address is bound again.

    Raises:
        OSError: it cannot be started; EADDRINUSE when another process has its port.
    """
    clean_up_after_shim(run_file.run_dir, grace_seconds=0.0)
    listen_fds = _listeners_of_siblings(run_file)
    if not listen_fds:
        opened = open_listening_sockets(run_file.host, run_file.port)
        listen_fds = [listener.detach() for listener in opened]
    try:
        start_shim(run_file.run_dir, run_file.data, listen_fds=listen_fds)
    finally:
        close_all(listen_fds)


def address_of(host: str, port: int) -> str:
    """The address that a client on this machine uses for a server bound to `host`."""
    if host in ("0.0.0.0", "::"):  # noqa: S104  compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _remove(run_dir: Path) -> None:
    """Remove a replica's folder, its run file last: until then, everybody finds it."""
    with contextlib.suppress(OSError):
        for path in run_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != RUN_FILE_NAME:
                path.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def _ask_to_stop(run_dir: Path, grace_seconds: float) -> ShimClient | None:
    run_file = read(run_dir)
    if run_file is None:
        return None
    try:
        link = ShimClient.connect(run_file.socket_path)
    except ShimGone:
        return None
    try:
        link.send("stop", grace_seconds=grace_seconds)
    except ShimGone:
        link.close()
        return None
    return link


def _await_end(link: ShimClient, timeout_seconds: float) -> None:
    # The end of the connection is the end of the shim; one that does not answer is ended by
    # `clean_up_after_shim`.
    with link, contextlib.suppress(ShimGone, TimeoutError):
        link.wait(lambda _: False, timeout=timeout_seconds)


def _listeners_of_siblings(run_file: RunFile) -> list[int]:
    for sibling in of_environment(run_file.run_dir.parent, run_file.environment):
        if sibling.replica_id == run_file.replica_id or sibling.port != run_file.port:
            continue
        try:
            with ShimClient.connect(sibling.socket_path) as link:
                return link.request_listeners()
        except (ShimGone, TimeoutError, LookupError):
            continue
    return []
