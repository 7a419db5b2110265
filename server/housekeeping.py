# SPDX-License-Identifier: Apache-2.0
"""Removes what nothing uses any more, and logs that; makes the folder of sockets.

    run folders without a run file   the removal was cut short, or the file was lost
    cgroups of replicas              below `openenvd/replicas-<home>`, without a run folder
    processes of replicas            whose variables name a run folder of this home that is gone
    sockets of replicas              without a process and a run folder: of a launch that was killed
                                     before it wrote one
    cgroups of workers               below `openenvd/executor-<pid>`, whose daemon has ended
    cgroups of other homes           `openenvd/replicas-<home>` without a process: that home was
                                     removed, or makes its group again

This runs at the start and every few minutes. Something without an owner may be about to get one, so
it is removed only if two sweeps in a row have found it without an owner; the second removes it as
soon as it has, before it looks further.
A process that sees another folder at the home's path, in a container, is another home's.

At the start and every day (`collect_daily`) abandoned folders of sockets, and virtual environments
that nothing has used lately (`environments.venv.cleanup`). Requests and logs are removed by the
dispatcher's `Janitor`, which knows what runs. Nothing waits for any of it: a failure is logged, and
tried again.

The folder of a home's sockets is `home/sockets`, or a short one in the temporary folder when that
is too long a path.

    made        by each daemon that starts (`held`)
    removed     by the daemon that stops, when no shim has a socket there; by the last shim of a
                home that was removed (`shim.files.remove_if_empty`)
    collected   by the next daemon of any home of the same user, when no process listens there:
                killed daemons and shims leave their sockets behind (`collect_abandoned`)

A process that binds a socket there or removes the folder holds the lock on the folder itself, so
that the folder is not removed between being made and being bound in.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..environments import run_files
from ..environments.engines.local.ports import renew_reservations
from ..environments.engines.providers import RUN_DIR_VARIABLE
from ..environments.preparation.venv_cleanup import prune_old
from ..environments.shim.client import clean_up_after_shim, end_group
from ..environments.shim.files import LOCK_FILE_NAME, RUN_FILE_NAME
from ..requests_db.async_store import AsyncStore
from ..requests_db.errors import DatabaseError
from ..requests_db.sql import queries
from ..schema.layout import Layout, make_private, socket_folders_outside
from ..schema.settings import Paths, Settings
from ..system.files.disk_space import keep_reserve
from ..system.memory.cgroups import Cgroup, existing_groups
from ..system.process.process_identity import ProcessIdentity, is_locked
from ..system.text.units import MB

CONFIRMATION_SECONDS = 5.0
EVERY_SECONDS = 300.0
DAY_SECONDS = 86_400.0
_SHIMS = "shims"  # the cgroup of all shims
# Named by digests: of a replica, or of an environment and with a number (`Layout.doors`).
_DIGITS = 16
_SOCKET = re.compile(rf"[0-9a-f]{{{_DIGITS}}}(-\d+\.door|\.sock|\.admin)")

log = logging.getLogger(__name__)


async def sweep_regularly(layout: Layout, sweep_worker_cgroups: Callable[[], list[str]]) -> None:
    """Sweep now, once more soon, and then every few minutes, until cancelled."""
    sweeper, seconds = Sweeper(layout), CONFIRMATION_SECONDS
    while True:
        try:
            for name in await asyncio.to_thread(sweep_worker_cgroups):
                log.warning("taken away: cgroup %s, whose daemon has ended", name)
            await asyncio.to_thread(sweeper.sweep)
            if ended := await asyncio.to_thread(sweeper.sweep_other_homes):
                log.info("taken away: the cgroups of %d homes without a process", len(ended))
        except (OSError, RuntimeError) as exc:  # the latter: there is no room for a thread
            log.warning("the sweep failed: %s", exc)
        await asyncio.sleep(seconds)
        seconds = EVERY_SECONDS


class Sweeper:
    """Sweeps, and remembers what the last sweep has found."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._suspects: set[str] = set()
        self._empty: set[str] = set()  # cgroups of other homes

    def sweep(self) -> list[str]:
        """Sweep once: remove what the last sweep has found, too; return the names. Blocks."""
        if not self._layout.runs.is_dir():  # the home is being removed, or moved
            return []
        usable, aside = run_files.look(self._layout.runs)
        renew_reservations(self._layout.runs, usable)
        found, taken = set(), []
        for name, remove in self._ownerless(environment_names(usable, aside)):
            if name in self._suspects:
                log.warning("taken away: %s", name)
                remove()  # at once: a repeated launch may begin
                taken.append(name)
            else:
                found.add(name)
        self._suspects = found
        return taken

    def sweep_other_homes(self) -> list[str]:
        """Find other homes' cgroups without a process; remove those found twice. Blocks.

        Thousands may be there, of homes of tests. The kernel keeps a group that a process enters.
        """
        groups = {group.name: group for group in existing_groups("replicas-*")}
        own = f"/{self._layout.replica_groups}"
        found = {n: g for n, g in groups.items() if not n.endswith(own) and _is_empty(g)}
        removed = [n for n in self._empty & found.keys() if found[n].remove_with_children()]
        self._empty = set(found) - set(removed)
        return removed

    def _ownerless(self, names: set[str]) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield what has no owner, and a call that removes it; `names` have replicas."""
        runs = self._layout.runs
        for folder in filter(_has_no_owner, self._run_folders()):
            yield f"{folder}, which has no run file", partial(_remove_folder, folder)
        for group in existing_groups(f"{self._layout.replica_groups}/*"):
            replica = Path(group.directory).name
            if replica != _SHIMS and not self._is_there(replica) and _is_of(group, runs):
                yield f"cgroup {group.name}, whose replica is gone", partial(end_group, group)
        for identity, replica in _replica_processes(runs):
            if not self._is_there(replica):
                yield (
                    f"process {identity.pid} of {replica}, which is gone",
                    partial(_kill, identity),
                )
        for found in self._ownerless_sockets(names):
            yield f"socket {found[0]}, whose replica is gone", partial(self._remove, found)

    def _remove(self, found: tuple[Path, int]) -> None:
        names = environment_names(*run_files.look(self._layout.runs))
        if found in self._ownerless_sockets(names):  # a repeated launch may have begun meanwhile
            found[0].unlink(missing_ok=True)

    def _ownerless_sockets(self, names: set[str]) -> Iterator[tuple[Path, int]]:
        layout = self._layout
        owned = {layout.replica_socket(f.name).name[:_DIGITS] for f in self._run_folders()}
        owned.update(Path(layout.doors(name)).name[:_DIGITS] for name in names)
        with contextlib.suppress(OSError):
            for path in layout.sockets.iterdir():
                is_owned = path.name[:_DIGITS] in owned
                if _SOCKET.fullmatch(path.name) and not is_owned and has_no_listener(path):
                    yield path, path.lstat().st_ino

    def _is_there(self, replica: str) -> bool:
        return (self._layout.runs / replica).is_dir()

    def _run_folders(self) -> list[Path]:
        return [path for path in self._layout.runs.glob("*") if path.is_dir()]


def environment_names(
    usable: Iterable[run_files.RunFile], aside: Iterable[run_files.SetAside]
) -> set[str]:
    """Return the names of the environments that have run files."""
    return {each.environment for each in usable} | {each.environment for each in aside}


def _has_no_owner(folder: Path) -> bool:
    # A shim holds the lock of its folder.
    return not (folder / RUN_FILE_NAME).exists() and not is_locked(folder / LOCK_FILE_NAME)


def _remove_folder(folder: Path) -> None:
    clean_up_after_shim(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _is_empty(group: Cgroup) -> bool:
    """Return whether a group and those below it are empty; other namespaces' pids are 0."""
    below = (Cgroup(folder, group.name, group.version) for folder, *_ in os.walk(group.directory))
    return not any(each.pids() for each in below)


def _kill(identity: ProcessIdentity) -> None:
    with contextlib.suppress(OSError):
        identity.signal(signal.SIGKILL)


def _replica_processes(runs: Path) -> Iterator[tuple[ProcessIdentity, str]]:
    """Find processes that a replica has started, by the variable that they were given."""
    mark = f"{RUN_DIR_VARIABLE}={runs}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            identity = ProcessIdentity.of(int(entry.name))
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(mark) and _sees(entry, runs):
                    yield identity, variable[len(mark) :].decode(errors="replace")


def _is_of(group: Cgroup, runs: Path) -> bool:
    """Return whether no process in a group is of another home at the same path."""
    for process in (Path(f"/proc/{pid}") for pid in group.pids()):
        try:
            if not _sees(process, runs):
                return False
        except OSError:  # there is nothing at that path, unless the process has ended
            if process.exists():
                return False
    return True


def _sees(process: Path, folder: Path) -> bool:
    """Return whether a process sees the same folder at a path as we do; a container may not."""
    return Path(f"{process}/root{folder}").samefile(folder)


async def collect_daily(paths: Paths, settings: Settings, store: AsyncStore) -> None:
    """Clean up now and every day, until cancelled."""
    while True:
        try:
            run_seconds = await store.read(queries.RUN_SECONDS)
            await asyncio.to_thread(collect, paths, settings, run_seconds)
        except (OSError, DatabaseError, RuntimeError) as exc:  # the last: no room for a thread
            log.warning("the daily cleanup failed: %s", exc)
        await asyncio.sleep(DAY_SECONDS)


def collect(paths: Paths, settings: Settings, run_seconds: float) -> None:
    """Clean up once; daemons have run for `run_seconds` in all. Blocks."""
    if gone := collect_abandoned(socket_folders_outside()):
        log.info("removed %d abandoned folders of sockets", len(gone))
    keep_reserve(paths.home)
    for venv in prune_old(paths, run_seconds, settings.keep_venv_days * DAY_SECONDS):
        whose, size = venv.project or "an unfinished launch", venv.freed_bytes / MB
        text = "removed the virtual environment of %s, unused for %g days: %.0f MB"
        log.info(text, whose, settings.keep_venv_days, size)


MAX_REMOVALS = 100  # of the folder between making and locking it, one after the other

# How `connect` fails at a socket whose owner has died. Any other error may be a live owner: a full
# backlog is EAGAIN.
_NO_LISTENER = (errno.ECONNREFUSED, errno.ENOENT)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder, and keep it within the block; raises `OSError` if it cannot be ours."""
    with contextlib.ExitStack() as stack:
        for attempt in range(MAX_REMOVALS):
            try:
                make_private(folder)
                stack.enter_context(_locked(folder))
                break
            # `mkdir` raises the latter, too, for a folder removed meanwhile.
            except (FileNotFoundError, FileExistsError):
                if attempt == MAX_REMOVALS - 1:
                    raise
        yield


def collect_abandoned(folders: Iterable[Path]) -> list[Path]:
    """Remove the folders of sockets in which no process listens; return them.

    Other users' folders, and folders that hold anything but sockets, stay.
    """
    removed = []
    for folder in folders:
        # An `OSError`: it was removed meanwhile, is held, or is another user's.
        with contextlib.suppress(OSError), _locked(folder, wait=False):
            sockets = list(folder.iterdir())
            if all(has_no_listener(path) for path in sockets):
                for path in sockets:
                    path.unlink(missing_ok=True)
                folder.rmdir()
                removed.append(folder)
    return removed


def has_no_listener(path: Path) -> bool:
    """Return whether a path, at which there is something, is a socket without a listener."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in _NO_LISTENER


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder of this user; an `OSError`: it is gone, held or another's."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(folder))
        yield
    finally:
        os.close(descriptor)
