# SPDX-License-Identifier: Apache-2.0
"""Prepares a process for forking, and forked children to run a program without exec.

    before the first fork              `preload`, `thread_count`
    a fork whose parent is our own     `fork_sibling`

    what exec would do                 here
    descriptors close on exec          `close_all_but`
    handlers and mask are the default  `reset_signals`; `signal_pipe` undoes its own at every fork
    a new argv and environment         `set_environment`
    the program runs, then exits       `run_and_exit`

The parent's Python objects continue to exist in the child. So the caller must not return from the
frame that forked: a socket of that frame would be garbage-collected, and would close a descriptor
number that is used for something else by then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from .prctl import die_with_parent, set_thread_name

EXIT_UNCAUGHT = 1  # the code with which Python itself exits

_FIRST_FREE_FD = 3
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
# Those of shim, zygote and host. Checking all signals would cost every process 300 kB.
TAKEN_OVER = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT)

# <linux/sched.h>, <linux/prctl.h>; the number of clone(2), and its arguments after the flags
_CLONE_PARENT = 0x8000
_CLONE_CHILD_CLEARTID = 0x200000
_CLONE_CHILD_SETTID = 0x1000000
_PR_GET_TID_ADDRESS = 40
_CLONE = {
    "x86_64": (56, ("stack", "parent_tid", "child_tid", "tls")),
    "aarch64": (220, ("stack", "parent_tid", "tls", "child_tid")),
    "riscv64": (220, ("stack", "parent_tid", "tls", "child_tid")),
}.get(os.uname().machine)
# Looked up before any fork: an audit hook may refuse that, in a copy alone.
_libc = ctypes.PyDLL(None, use_errno=True)
_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
_after_fork_in_child = ctypes.pythonapi.PyOS_AfterFork_Child
for _function in (_before_fork, _after_fork_in_parent, _after_fork_in_child):
    _function.restype = None
_ALL_SIGNALS = tuple(map(int, signal.valid_signals()))

forks = 0  # the number of forks between the first process and this one


def _after_fork() -> None:
    """Count the fork; give its child a main thread that can end, unlike Python before 3.13.

    A thread that was started without `threading.Thread` has a dummy object once its code has logged
    or started a thread. In a child that it forks, that dummy is the main thread, and has no lock:
    `multiprocessing` then ends the child with exit code 1, whatever it has returned.
    """
    global forks
    forks += 1
    module: Any = sys.modules["threading"]  # not a copy of our own: `env_host/preload.py`
    main = module.main_thread()
    if getattr(main, "_tstate_lock", main) is None and type(main).__module__ == "threading":
        module._main_thread = module._MainThread()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)


def preload(modules: Iterable[str], *, collect: bool = True) -> None:
    """Import modules so that forked processes share their pages.

    A module that cannot be imported is left to the process that needs it, which reports the error.
    Collecting the garbage of imports (`collect`) takes some tens of milliseconds.
    """
    gc.disable()  # objects of imports stay: a collection scans many, and frees none
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException:  # a module may call sys.exit
            traceback.print_exc()
    if collect:
        gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Count this process's threads, including those of C libraries; 1 if unknown.

    With more than one, forking is unsafe: a child lacks the other threads, but has their locks.
    """
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return 1


def _tid_address() -> int | None:
    """Return where the C library keeps the id of this thread; None: not known, as with musl."""
    if sys.platform != "linux" or _CLONE is None or sys.maxsize < 1 << 32:
        return None
    address = ctypes.c_void_p()
    _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    if not address.value:
        return None
    known = ctypes.c_int.from_address(address.value).value
    return address.value if known == threading.get_native_id() else None


# Linux with glibc. gVisor, which takes CLONE_PARENT and ignores it, has no PR_GET_TID_ADDRESS.
CAN_FORK_SIBLINGS = _tid_address() is not None


def fork_sibling(run: Callable[[], object]) -> int:
    """Fork a child of this process's parent, which reaps it; return the child's pid.

    The child calls `run`, which exits; if `run` returns or raises, the exit code is 1. For
    processes with one thread where `CAN_FORK_SIBLINGS`. Functions that C libraries have registered
    by `pthread_atfork` are not called. Raises `OSError`.
    """
    assert _CLONE is not None
    number, names = _CLONE
    flags = signal.SIGCHLD | _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    values = (_tid_address() if name == "child_tid" else None for name in names)
    arguments = [ctypes.c_long(number), ctypes.c_ulong(flags), *map(ctypes.c_void_p, values)]
    sys.audit("os.fork")
    # A signal's handler must not run, nor raise, while the interpreter is prepared for a fork.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)
    try:
        _before_fork()
        pid: int = _libc.syscall(*arguments)
        if pid == 0:
            try:
                _after_fork_in_child()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                run()
            finally:
                os._exit(EXIT_UNCAUGHT)
        _after_fork_in_parent()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def open_fds() -> set[int]:
    """Return the open descriptors of this process."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208
        with contextlib.suppress(OSError):  # `listdir`'s own descriptor, which is closed by now
            os.fstat(int(name))
            found.add(int(name))
    return found


def close_all_but(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard three and these."""
    for fd in open_fds().difference(kept):
        if fd >= _FIRST_FREE_FD:
            os.close(fd)


def leave_parent(parent: int, name: str, kept: Iterable[int] | None) -> None:
    """Set up a forked child named `name`, which is killed when its parent dies.

    All descriptors but the standard three and those in `kept` are closed; None: all are kept.
    """
    die_with_parent(parent)
    if kept is not None:
        close_all_but(kept)
    set_thread_name(name)
    tell_libraries()


def tell_libraries() -> None:
    """Reseed libraries' random numbers, as Python does its own, and give gevent a new loop."""
    for name, function in (
        ("numpy.random", "seed"),
        ("torch.random", "seed"),
        ("gevent", "reinit"),
    ):
        module: Any = sys.modules.get(name)
        if callable(found := getattr(module, function, None)):
            found()


def write_output_to(log_fd: int) -> None:
    """Redirect all output of this process to `log_fd`, and its input to the null device."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, standard in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, standard)
    os.close(null)


def reset_signals() -> None:
    """Handle signals as Python starts: SIGINT raises KeyboardInterrupt, no signal is blocked."""
    reset_handlers()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_handlers() -> None:
    """Reset handlers that we did not set, too: some signals were ignored before we started."""
    for number in TAKEN_OVER:
        signal.signal(number, signal.SIG_DFL)


def set_environment(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Replace all environment variables, and apply those that Python reads at its start.

    `__main__` becomes a module of the new program, whose file is the last word of `argv`.
    """
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    if environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.argv = list(argv[-1:])  # the program, without arguments
    sys.orig_argv = list(argv)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = argv[-1]


def run_and_exit(entry: str, *arguments: Any) -> NoReturn:
    """Call `module:function`, and exit with its result, like a program."""
    code = EXIT_UNCAUGHT
    gc.enable()
    try:
        module, _, name = entry.partition(":")
        code = _exit_code(getattr(importlib.import_module(module), name)(*arguments))
    except BaseException as exc:
        code = _code_of(exc)
    finally:
        finish(code)


def end_copy(forks_before: int, exc: BaseException | None) -> None:
    """End this process if it was forked since `forks_before`, in a call that ended with `exc`.

    Such a process is a copy of its parent, and serves no session. It exits as a program would at
    its end, but without the parent's `atexit` functions, which concern the parent's resources.
    """
    if forks == forks_before:
        return
    flush_and_exit(0 if exc is None else _code_of(exc))


def _code_of(exc: BaseException) -> int:
    """Return the code to exit with because of an exception, which is printed as Python does."""
    if isinstance(exc, SystemExit):
        return _exit_code(exc.code)
    traceback.print_exception(exc)
    return EXIT_UNCAUGHT


def _exit_code(value: object) -> int:
    if value is None or isinstance(value, int):
        return int(value or 0) & 0xFF
    print(value, file=sys.stderr)  # noqa: T201  as `sys.exit` does it
    return EXIT_UNCAUGHT


def finish(code: int) -> NoReturn:
    """Exit as the interpreter does, without unwinding the parent's frames."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  as multiprocessing does
        atexit._run_exitfuncs()  # noqa: SLF001
    flush_and_exit(code)


def flush_and_exit(code: int) -> NoReturn:
    """Exit without finalizers."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Write what Python has buffered for standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
