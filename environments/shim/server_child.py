# SPDX-License-Identifier: Apache-2.0
"""How a shim starts its server.

`fork` and `exec` by hand rather than `subprocess`: that module costs a shim 1.1 MB, and between
the two the child must do more than it offers (die with its parent, enter its cgroup). Safe
because the shim has one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Never

from ...system.memory.cgroups import Cgroup
from ...system.process.prctl import die_with_parent
from ...system.process.proc import set_oom_score_adj


class ForkInto(NamedTuple):
    """How a server is called instead of exec'ed: its modules are imported here already."""

    entry: str  # module:function
    title: str  # in `ps`


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
    """Start a program in its own session, which is killed when this process exits.

    It enters `cgroup` first; `fork_into` is called instead of loading the program. Returns its pid,
    once the program has been loaded or is about to be called. Raises `OSError` when it could not be
    started, with the reason of the step that failed.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(parent)
            if cgroup is not None:
                cgroup.add(os.getpid())
            if oom_score_adj is not None:
                set_oom_score_adj(os.getpid(), oom_score_adj)
            if cwd is not None:
                os.chdir(cwd)
            null = os.open(os.devnull, os.O_RDONLY)
            for fd, standard in ((null, 0), (log_fd, 1), (log_fd, 2)):
                os.dup2(fd, standard)
            for fd in keep_fds:
                os.set_inheritable(fd, True)
            if fork_into is not None:
                _call(fork_into, argv, environ, keep_fds)
            _reset_handlers_for_exec()
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


def _reset_handlers_for_exec() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # ignoring would survive `exec`


def _call(
    fork_into: ForkInto, argv: Sequence[str], environ: Mapping[str, str], keep_fds: Iterable[int]
) -> Never:
    """Do what `exec` would have done; closes the pipe on which a failed start is reported."""
    from ...system.process import forking

    forking.reset_signals()
    forking.set_environment(environ, argv)
    set_title(fork_into.title)
    forking.close_all_but(keep_fds)
    forking.run_and_exit(fork_into.entry)


def set_title(title: str) -> None:
    """Set what `ps` shows of this process; a shim of its own Python has no library for it."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


def _report(fd: int, exc: BaseException, program: str) -> Never:
    number, where = getattr(exc, "errno", None), getattr(exc, "filename", None)
    os.write(fd, f"{number or errno.EIO} {where or program}".encode()[:4096])
    os._exit(127)
