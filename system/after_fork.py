# SPDX-License-Identifier: Apache-2.0
"""Making a forked child as good as an exec'ed one: nothing of its parent's but the pages it shares.

    what exec would do                 here
    descriptors close on exec          `close_all_but`
    handlers and mask are the default  `reset_signals`
    a new argv and environment         `live_in`, `be_called`
    the program runs, then exits       `run_and_exit`

The parent's Python objects are still there, and live as long as the process: whoever calls this
must not return from the frame that forked, or a socket that is collected there would close a
descriptor which is somebody else's by then.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

EXIT_UNCAUGHT = 1  # as Python itself says it

_FIRST_FREE_FD = 3
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
# By fork server and shim. Not all there are: to look at each costs every process 300 kB.
_SET_BY_PARENTS = (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard three and these."""
    keep = set(kept)
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208
        if int(name) >= _FIRST_FREE_FD and int(name) not in keep:
            with contextlib.suppress(OSError):  # that of the folder itself
                os.close(int(name))


def write_output_to(log_fd: int) -> None:
    """Nothing to read; what is printed, by anyone in this process, goes to `log_fd`."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, standard in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, standard)
    os.close(null)


def reset_signals() -> None:
    """What Python starts with: KeyboardInterrupt, and the default of what a parent has set."""
    signal.set_wakeup_fd(-1)
    for number in _SET_BY_PARENTS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def live_in(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """These environment variables and no others, and what Python would have read from them."""
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.argv = list(argv[-1:])  # the program, which was given no words
    sys.orig_argv = list(argv)


def be_called(title: str) -> None:
    """The name in `ps` and `top`."""
    import setproctitle

    setproctitle.setproctitle(title)


def run_and_exit(entry: str) -> NoReturn:
    """Call `module:function`, and end as a program ends that exits with what it returned."""
    code = EXIT_UNCAUGHT
    gc.enable()
    try:
        module, _, name = entry.partition(":")
        code = _exit_code(getattr(importlib.import_module(module), name)())
    except SystemExit as exc:
        code = _exit_code(exc.code)
    except BaseException:
        traceback.print_exc()
    finally:
        _finish(code)


def _exit_code(value: object) -> int:
    if value is None or isinstance(value, int):
        return int(value or 0) & 0xFF
    print(value, file=sys.stderr)  # noqa: T201  as `sys.exit` does it
    return EXIT_UNCAUGHT


def _finish(code: int) -> NoReturn:
    """What the interpreter does at its end; not the frames below us, they are our parent's."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  as multiprocessing does
        atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
