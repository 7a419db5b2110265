# SPDX-License-Identifier: Apache-2.0
"""How a shim starts its server, and who else has become its child.

`fork` and `exec` by hand rather than `subprocess`: that module costs a shim 1.1 MB, and between
the two the child must do more than it offers (die with its parent, enter its cgroup). Safe
because the shim has one thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Never

from ..system.cgroups import Cgroup

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_IS_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class ForkInto(NamedTuple):
    """A server that is called instead of exec'ed: its modules are imported here already."""

    entry: str  # module:function
    title: str  # in `ps`


def become_subreaper() -> None:
    """Orphans below us become our children rather than init's (Linux)."""
    if _IS_LINUX:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def adopted_children() -> list[int]:
    """The pids of our children, adopted ones included; none where the kernel does not say."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: str | None,
    log_fd: int,
    keep_fds: Iterable[int],
    cgroup: Cgroup | None,
    oom_score_adj: int | None,
    fork_into: ForkInto | None = None,
) -> int:
    """Start a program that dies with us, in its own session, its output appended to `log_fd`.

    Returns its pid once the program has been loaded, or is about to be called (`fork_into`).

    Raises:
        OSError: when it could not be started, with the reason of the step that failed.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _prepare(parent, cwd, log_fd, keep_fds, cgroup, oom_score_adj)
            if fork_into is not None:
                _call(fork_into, argv, environ, keep_fds)
            _reset_signals_for_exec()
            os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 (no shell is the point)
        except BaseException as exc:
            _report(writing, exc, argv[0])
        finally:
            os._exit(127)
    os.close(writing)
    try:
        # The end of the pipe is the moment of `exec`: its writing end closes itself there.
        failure = os.read(reading, 4096).decode(errors="replace")
    finally:
        os.close(reading)
    if failure:
        os.waitpid(pid, 0)
        number, _, where = failure.partition(" ")
        raise OSError(int(number), os.strerror(int(number)), where)
    return pid


def _prepare(
    parent: int,
    cwd: str | None,
    log_fd: int,
    keep_fds: Iterable[int],
    cgroup: Cgroup | None,
    oom_score_adj: int | None,
) -> None:
    os.setsid()
    _die_with(parent)
    if cgroup is not None:
        cgroup.add(os.getpid())
    if oom_score_adj is not None:
        set_own_oom_score_adj(oom_score_adj)
    if cwd is not None:
        os.chdir(cwd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    for fd in keep_fds:
        os.set_inheritable(fd, True)


def _reset_signals_for_exec() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # ignoring would survive `exec`


def _call(
    fork_into: ForkInto, argv: Sequence[str], environ: Mapping[str, str], keep_fds: Iterable[int]
) -> Never:
    """What `exec` would have done; closes the pipe on which a failure to start is told."""
    from ..system import after_fork

    after_fork.reset_signals()
    after_fork.live_in(environ, argv)
    after_fork.be_called(fork_into.title)
    after_fork.close_all_but(keep_fds)
    after_fork.run_and_exit(fork_into.entry)


def _die_with(parent: int) -> None:
    if _IS_LINUX:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above took effect
            os._exit(127)


def set_own_oom_score_adj(value: int) -> None:
    """Tell the kernel how soon to pick this process when memory runs out; best effort."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(value))
    except OSError:
        pass  # lowering needs privilege; the server runs all the same


def _report(fd: int, exc: BaseException, program: str) -> Never:
    number = exc.errno if isinstance(exc, OSError) and exc.errno else 5  # EIO
    where = exc.filename if isinstance(exc, OSError) and exc.filename else program
    os.write(fd, f"{number} {where}".encode()[:4096])
    os._exit(127)
