# SPDX-License-Identifier: Apache-2.0
"""The sweep: what carries this home's mark and has no owner is taken away, which the log says.

    run folders without a run file   the removal was cut short, or the file was lost
    cgroups of replicas              below `openenvd/replicas-<home>`, without a run folder
    processes of replicas            whose variables name this home, and a replica without one
    cgroups of workers               below `openenvd/executor-<pid>`, whose daemon has ended

At the start and every few minutes. What looks ownerless may be about to get an owner, so it is
taken away when two looks in a row have found it so.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ...env_host.protocol import REPLICA_HEADER
from ...environments.layout import Layout
from ...environments.providers.environment_variables import HOME_VARIABLE
from ...environments.providers.ports import renew_reservations
from ...shim.client import clean_up_after_shim, end_group
from ...shim.files import LOCK_FILE_NAME, RUN_FILE_NAME
from ...system.cgroups import existing_groups
from ...system.process_identity import ProcessIdentity

SECOND_LOOK_SECONDS = 5.0
EVERY_SECONDS = 300.0
_REPLICA_ID = re.compile(rb'"%s": "([^"]+)"' % REPLICA_HEADER.encode())
_SHIMS = "shims"  # the cgroup of all shims

log = logging.getLogger(__name__)


async def sweep_regularly(layout: Layout, sweep_worker_cgroups: Callable[[], list[str]]) -> None:
    """Sweep now, once more soon, and then every few minutes, until cancelled."""
    sweeper = Sweeper(layout)
    seconds = SECOND_LOOK_SECONDS
    while True:
        try:
            for name in await asyncio.to_thread(sweep_worker_cgroups):
                log.warning("taken away: cgroup %s, whose daemon has ended", name)
            await asyncio.to_thread(sweeper.sweep)
        except (OSError, RuntimeError) as exc:  # the latter: there is no room for a thread
            log.warning("the sweep failed: %s", exc)
        await asyncio.sleep(seconds)
        seconds = EVERY_SECONDS


class Sweeper:
    """Remembers what the last look has found."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._suspects: set[str] = set()

    def sweep(self) -> list[str]:
        """Look once; take away what the last look has found, too, and return its names. Blocks."""
        renew_reservations(self._layout.runs)
        found = {**self._folders(), **self._groups(), **self._processes()}
        taken = [name for name in found if name in self._suspects]
        for name in taken:
            log.warning("taken away: %s", name)
            found[name]()
        self._suspects = set(found) - set(taken)
        return taken

    def _folders(self) -> dict[str, Callable[[], object]]:
        return {
            f"{folder}, which has no run file": partial(_remove_folder, folder)
            for folder in self._run_folders()
            if not (folder / RUN_FILE_NAME).exists() and not _has_shim(folder)
        }

    def _groups(self) -> dict[str, Callable[[], object]]:
        kept = {_SHIMS, *(folder.name for folder in self._run_folders())}
        return {
            f"cgroup {group.name}, whose replica is gone": partial(end_group, group)
            for group in existing_groups(f"{self._layout.replica_groups}/*")
            if os.path.basename(group.directory) not in kept  # noqa: PTH119
        }

    def _processes(self) -> dict[str, Callable[[], object]]:
        kept = {folder.name for folder in self._run_folders()}
        return {
            f"process {identity.pid} of {replica}, which is gone": partial(_kill, identity)
            for identity, replica in _replica_processes(self._layout.home)
            if replica not in kept
        }

    def _run_folders(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [path for path in self._layout.runs.iterdir() if path.is_dir()]
        return []


def _has_shim(folder: Path) -> bool:
    """Whether a shim runs there: it holds the folder's lock."""
    try:
        descriptor = os.open(folder / LOCK_FILE_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_folder(folder: Path) -> None:
    clean_up_after_shim(folder, grace_seconds=0.0)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(identity: ProcessIdentity) -> None:
    with contextlib.suppress(OSError):
        identity.signal(signal.SIGKILL)


def _replica_processes(home: Path) -> Iterator[tuple[ProcessIdentity, str]]:
    """Find processes that a replica has started, by the variables that they were given."""
    mark = f"{HOME_VARIABLE}={home}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            identity = ProcessIdentity.of(int(entry.name))
            variables = (entry / "environ").read_bytes()
            named = _REPLICA_ID.search(variables)
            if named and mark in variables.split(b"\0"):
                yield identity, named[1].decode(errors="replace")
