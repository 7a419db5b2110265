# SPDX-License-Identifier: Apache-2.0
"""A process of the env host before it serves: configuration, descriptors, GPU, byte code, garbage.

Byte code is written only for modules below some folders. A project imports a fifth of the thousands
of files that are its dependencies; each is compiled when it is first imported. Our own package is
compiled in the same way if it was installed for another Python: 100 files, a sixth of the cost of a
start. None is written into the project's own folder (`PYTHONDONTWRITEBYTECODE`, which programs that
the environment starts inherit).

`ChildConfig` configures a process that the supervisor starts.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any

from ..system.text.units import plural

if TYPE_CHECKING:
    from ..system.memory.cgroups import Cgroup

HOME = 0  # the shard that answers the project's own routes (`serving/own_app.py`)
STOPPING = "This replica of the environment is stopping."  # why sessions end, or do not begin

log = logging.getLogger("openenvd.env_host")


def stacks_signal() -> int:
    """Return the signal that makes a child write the stacks of all its threads, even if they block.

    0: the environment handles that signal, or the system does not have it.
    """
    number = int(getattr(signal, "SIGRTMAX", 0))
    return number if number and signal.getsignal(number) is signal.SIG_DFL else 0


def write_stacks_at_signal() -> None:
    """Make this process write its stacks to the log at `stacks_signal`."""
    if number := stacks_signal():
        faulthandler.register(number, 2)  # whatever `sys.stderr` is


def enter_group(group: Cgroup | None, pid: int) -> None:
    """Add a process to the memory cgroup of its session, if there is one."""
    try:
        if group is not None:
            group.add(pid)
    except OSError as exc:  # serve all the same: the replica's own cap still holds
        log.warning("a session runs without its memory cap: %s", exc)


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """A child's place, its bounds, and the descriptors that it inherits."""

    index: int  # a shard's row of the scoreboard
    generation: int = 0
    shards: int = 0
    max_sessions: int = 1
    exclusive: bool = False  # the class allows one session at a time in a process
    scoreboard_fd: int | None = None
    link_fd: int | None = None
    inbox_fd: int | None = None  # where others send it connections
    inbox_fds: Sequence[int] = ()  # where it sends connections to others, by index
    isolates: bool = False  # its sessions have processes of their own
    has_template: bool = False  # these are forked from a process that the shard has for that
    state_address: str | None = None  # of the state process, if sessions share a state
    session_fd: int | None = None  # a session's process: its end of the socket pair to its shard
    life_fd: int | None = None  # whose other end is closed when the supervisor exits
    imported_fds: Sequence[int] = ()  # that the environment opened at its import

    @property
    def is_home(self) -> bool:
        """Return whether it answers the project's own routes, and runs the project's hooks."""
        return self.index == HOME

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the child keeps."""
        own = (self.scoreboard_fd, self.link_fd, self.inbox_fd, self.session_fd, self.life_fd)
        return (*(fd for fd in own if fd is not None), *self.inbox_fds)


LOCK_SECONDS = 1.0  # that C code of an import may hold Python's lock
SPARE_FDS = 128  # besides those of sessions: modules, pipes, files of environments
NEVER = 2**31 - 1  # objects until a collection
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Suspend garbage collection: imports make a million objects and hardly any garbage.

    Settings that an import makes itself (`gc.disable`, a threshold) stay.
    """
    before = gc.get_threshold()
    gc.set_threshold(NEVER)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == NEVER:
            gc.set_threshold(*before)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _StackLater:
    """Writes the stack of a thread after a while, unless `end` is called before."""

    def __init__(self, of_thread: int, seconds: float) -> None:
        self._of_thread = of_thread
        self._seconds = seconds
        self._locks: tuple[_thread.LockType, _thread.LockType] | None = None

    def begin(self) -> None:
        self._locks = _thread.allocate_lock(), _thread.allocate_lock()
        for lock in self._locks:
            lock.acquire()
        faulthandler.dump_traceback_later(self._seconds + LOCK_SECONDS, file=2)
        _thread.start_new_thread(self._write, self._locks)

    def end(self) -> None:
        """Stop the timer; its threads have ended when this returns."""
        if self._locks is not None:
            is_over, has_ended = self._locks
            self._locks = None
            is_over.release()
            has_ended.acquire()
            faulthandler.cancel_dump_traceback_later()

    def _write(self, is_over: _thread.LockType, has_ended: _thread.LockType) -> None:
        if not is_over.acquire(timeout=self._seconds):
            faulthandler.cancel_dump_traceback_later()
            frames = traceback.extract_stack(sys._current_frames()[self._of_thread])  # noqa: SLF001
            lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}\n' for f in frames]
            os.write(2, "".join(["The import is here:\n", *lines[::-1]]).encode())
            is_over.acquire()
        has_ended.release()


@contextlib.contextmanager
def contained_import(seconds: float = 10.0) -> Iterator[None]:
    """Keep an import from ending this process and from serving; write its stack if it is slow.

    `os._exit` raises `SystemExit` there, and `uvicorn.run` returns at once. The stack is written by
    a thread; if C code holds Python's lock, by `faulthandler`, which must not read the frames of
    code that runs (that can crash). Neither thread exists when the process forks.
    """
    importing, is_running = (os.getpid(), _thread.get_ident()), _thread.allocate_lock()
    exit_at_once, began = os._exit, time.monotonic()
    stack = _StackLater(importing[1], seconds)

    def exit_or_raise(status: int) -> None:
        if is_running.locked() and importing == (os.getpid(), _thread.get_ident()):
            raise SystemExit(f"os._exit({status})")
        exit_at_once(status)

    def watch() -> None:
        if is_running.locked():
            stack.begin()

    os.register_at_fork(before=stack.end, after_in_parent=watch)
    no_exit = replaced(sys.modules["os"], "_exit", exit_or_raise)
    no_server = replaced(sys.modules["uvicorn"], "run", lambda *_, **__: None)
    with is_running, no_exit, no_server:
        watch()
        try:
            yield
        finally:
            stack.end()
    if (took := time.monotonic() - began) > seconds:
        log.warning("the import took %.0f s; the stack is that after %g s", took, seconds)


def sessions_of_process(limit: int) -> int:
    """Return for how many sessions a process has descriptors, with some left for HTTP."""
    return max(1, limit - 2 * SPARE_FDS)


def fitting_sessions(asked: int, limit: int, shards: int) -> int:
    """Return for how many of the sessions the descriptors of `shards` processes suffice."""
    if limit == resource.RLIM_INFINITY:
        return asked
    return max(1, min(asked, sessions_of_process(limit) * shards))


def note_on_few_fds(
    wanted: int, fitting: int, limit: int, shards: int, of_each: int = 1
) -> str | None:
    """Return a note for the user if there will be fewer sessions than are wanted."""
    if fitting >= wanted:
        return None
    return (
        f"only {fitting} of {wanted} sessions are possible: a session needs "
        f"{plural(of_each, 'file descriptor')}, and each of {shards} processes may have {limit} "
        "(ulimit -Hn). Raise the limit, or use more --shards"
    )


def device_of(index: int, gpus: int, visible: str | None) -> str:
    """Return the device of the shard or session `index`; shards take turns."""
    named = [device.strip() for device in (visible or "").split(",") if device.strip()][:gpus]
    devices = named or [str(number) for number in range(gpus)]
    return devices[index % len(devices)]


def pin_gpu(index: int, gpus: int) -> None:
    """Show this process, and what it starts, its own device alone; without GPUs, do nothing.

    The caller of the env host makes sure that the devices exist, and may name those of this replica
    in the same variable; without it, they are counted from 0.
    """
    if gpus > 0:
        os.environ[GPUS_VARIABLE] = device_of(index, gpus, os.environ.get(GPUS_VARIABLE))


def write_bytecode_below(*folders: str) -> None:
    """Write the byte code of imported modules whose files lie below one of the folders."""
    write = SourceFileLoader.set_data  # which imports call for byte code alone
    prefixes = tuple(folder + os.sep for folder in folders)

    def set_data(self: SourceFileLoader, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefixes):
            write(self, path, data, **options)

    SourceFileLoader.set_data = set_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = False
