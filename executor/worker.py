# SPDX-License-Identifier: Apache-2.0
"""The main loop of a worker: one task at a time, from its pipe to its pipe.

Frames the worker reads (see `messages.py`):

    {"task": id, "operation": "package.module:callable", "payload", "log_path", "label",
     "traceparent"?: set as the variable TRACEPARENT while the operation runs}

and writes:

    {"task": id, "kind": "progress", "data"}
    {"task": id, "kind": "succeeded", "result", …usage}
    {"task": id, "kind": "raised", "error": a `TaskError`, …usage}
    {"task": id, "kind": "cancelled", …usage}

where usage is `peak_bytes`, `rss_bytes` and `retire`: why the worker must not be used again.

The callable is called as `callable(payload, request_id, home, progress)`. Its stdout and stderr are
the task's log by file descriptor, so that what it and its children wrote survives any exit. The log
is there from the task's start, and is removed at its end if nothing is in it: most SHORT tasks
print nothing. A later attempt appends to what an earlier one has printed.

SIGTERM means: stop what you are doing. Only a running operation is interrupted, by `TaskCancelled`
in the main thread; a worker that is idle or still receiving is ended by it; one that reports its
outcome finishes that. It is never given another task afterwards.

A worker ends with its daemon in two ways: its own pipe ends, or, while it is busy, the death pipe
ends. Nothing is written to the death pipe: the daemon holds its writing end, which closes when the
daemon exits. A busy worker does not read, may be stuck in C code, and may have children. So the
*kernel* has to act: the worker opens the death pipe again (an open file description of its own),
makes its process group the owner and SIGKILL the signal of that file. When the daemon's exit closes
the writing end, the kernel signals the whole group (fcntl(2), F_SETOWN and F_SETSIG).

PR_SET_PDEATHSIG would not do: the parent of a worker is the zygote, whose exit must harm no task,
and it covers neither the worker's children nor a parent whose *thread* ended. Elsewhere than on
Linux a thread waits for the end of the pipe.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import setproctitle

from ..system.files import disk_space
from ..system.memory import limits
from ..system.memory.usage import private_bytes
from ..system.net.traceparent import VARIABLE
from ..system.process.prctl import die_with_writer
from ..system.process.proc import resident_bytes, set_oom_score_adj
from ..system.process.signal_pipe import take_over
from ..system.text.units import MB
from . import messages
from .errors import FrameError, TaskCancelled

Operation = Callable[[dict[str, Any], str, str, Callable[[dict[str, Any]], None]], Any]

# The kernel picks workers before the daemon, its zygote and the replicas when memory runs out.
WORKER_OOM_SCORE_ADJ = 600

WORTH_MEASURING_SECONDS = 0.03  # a task that takes as long is measured more precisely
# The kernel's high-water mark is reset only when a task used this much more than the worker before,
# because resetting it costs more than a quick task.
PEAK_RESOLUTION_BYTES = MB

READ_BYTES = 65_536  # of the pipe at once
MAX_MESSAGE_CHARS = 10_000
MAX_TRACEBACK_CHARS = 32_000

EXIT_PIPE_LOST = 74  # the pipe cannot be used any more, so nothing can be reported (EX_IOERR)


class Phase(enum.Enum):
    """The activity of a worker when SIGTERM arrives."""

    IDLE = enum.auto()  # waiting for a task or receiving one: SIGTERM ends it
    RUNNING = enum.auto()  # inside the operation: `TaskCancelled` is raised
    REPORTING = enum.auto()  # around the operation: what is under way is finished


def run_worker(name: str, pipe: socket.socket, *, death_pipe: int, home: str) -> NoReturn:
    """Run tasks as the worker `name` until the pipe ends; never returns.

    SIGTERM is blocked when it is called.
    """
    exit_code = EXIT_PIPE_LOST
    try:
        os.setsid()
        arm_parent_death_signal(death_pipe)
        set_oom_score_adj(os.getpid(), WORKER_OOM_SCORE_ADJ)
        Worker(name, pipe, home=home).run()
        exit_code = 0
    except (OSError, FrameError):  # the daemon is gone, or the operation closed our pipe
        pass
    finally:
        # Not sys.exit: threads, atexit hooks and buffers an operation left must not hold us up.
        os._exit(exit_code)


class Worker:
    """Receives, runs and reports one task after another."""

    def __init__(self, name: str, pipe: socket.socket, *, home: str) -> None:
        self._name = name
        self._pipe = pipe
        self._home = home
        self._reader = messages.FrameReader()
        self._phase = Phase.IDLE
        self._was_stopped = False
        self._shielded = False  # the main thread is writing a frame, which must stay whole
        self._write_lock = threading.Lock()  # progress may come from the operation's threads
        self._main_thread = threading.get_ident()
        self._own_threads = threading.active_count()
        self._memory = MemoryUsage()
        self._folder = Path.cwd()

    def run(self) -> None:
        """Run tasks until the pipe ends."""
        take_over((signal.SIGTERM,), lambda n: signal.signal(n, self._on_terminate))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._show_title()
        while (task := self._receive()) is not None:
            self._phase = Phase.REPORTING
            self._serve(task)
            self._phase = Phase.IDLE

    def _serve(self, task: dict[str, Any]) -> None:
        self._show_title(task["label"])
        begin_log(task["log_path"])
        self._memory.begin()
        outcome = self._outcome(task)
        end_log(task["log_path"])
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        usage = self._memory.read() | {"retire": self._why_retire()}
        self._send({"task": task["task"], **outcome, **usage})
        self._show_title()

    def _outcome(self, task: dict[str, Any]) -> dict[str, Any]:
        try:
            try:
                self._phase = Phase.RUNNING
                # Read after the phase is set: an earlier signal has only left this mark.
                if self._was_stopped:
                    raise TaskCancelled
                result = self._call(task)
            finally:
                self._phase = Phase.REPORTING
            return {"kind": "succeeded", "result": messages.encode_result(result)}
        except TaskCancelled:
            return {"kind": "cancelled"}
        except BaseException as exc:
            print_traceback(exc)
            return {"kind": "raised", "error": describe_error(exc, Path(self._home))}

    def _call(self, task: dict[str, Any]) -> Any:
        operation: Operation = pkgutil.resolve_name(task["operation"])
        task_id = task["task"]

        def progress(data: dict[str, Any]) -> None:
            self._send({"task": task_id, "kind": "progress", "data": data})

        if traceparent := task.get("traceparent"):  # the span that it and what it starts are in
            os.environ[VARIABLE] = traceparent
        try:
            return operation(task["payload"], task_id, self._home, progress)
        finally:
            if traceparent:
                os.environ.pop(VARIABLE, None)

    def _why_retire(self) -> str | None:
        """Return why a fresh worker must take this one's place; None when it is as good as new."""
        if (left := threading.active_count() - self._own_threads) > 0:
            return f"the operation left {left} threads running"
        if children_are_left():
            return "the operation left child processes running"
        if self._memory.children_masked:
            return "the next children are measured from zero"
        return "it was asked to stop" if self._was_stopped else None

    def _receive(self) -> dict[str, Any] | None:
        """Return the next task; None at the end of the pipe."""
        while data := self._pipe.recv(READ_BYTES):
            if tasks := self._reader.feed(data):
                [task] = tasks  # the next is sent when this one is over
                return dict(task)
        return None

    def _send(self, message: dict[str, Any]) -> None:
        frame = messages.encode_frame(message)
        if threading.get_ident() != self._main_thread:
            self._write(frame)
            return
        self._shielded = True
        try:
            self._write(frame)
        finally:
            self._shielded = False
        if self._was_stopped and self._phase is Phase.RUNNING:
            self._interrupt()

    def _write(self, frame: bytes) -> None:
        with self._write_lock:
            self._pipe.sendall(frame)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        first, self._was_stopped = not self._was_stopped, True
        if self._phase is Phase.IDLE:
            # As if the signal had never been handled: the exit status names it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if first and self._phase is Phase.RUNNING and not self._shielded:
            self._interrupt()

    def _interrupt(self) -> None:
        # Once only: the operation's own clean-up must be able to finish.
        self._phase = Phase.REPORTING
        raise TaskCancelled

    def _show_title(self, label: str = "") -> None:
        suffix = f" ({label})" if label else ""
        setproctitle.setproctitle(f"openenvd: worker {self._name}{suffix}")


class MemoryUsage:
    """Peak and present memory of this process, per task.

    The peak leaves out what is shared anyway, as a cgroup does: pages of files, and those inherited
    from the zygote unless the worker has written them. What it has written costs a millisecond to
    read, so that is done after tasks that took long enough. Of child processes the largest counts,
    if it was larger than this process and than any child before it: until a child has executed its
    own program, it looks as large as the worker.
    """

    def __init__(self) -> None:
        self._floor_bytes = 0
        self._children_bytes = 0
        self.children_masked = False  # this one's children hide those of a later task
        self._began_at = time.monotonic()
        resident, of_files = resident_bytes(os.getpid())
        self._inherited_bytes = (resident or 0) - of_files
        self._restart()

    def begin(self) -> None:
        """Begin to measure a task."""
        self._began_at = time.monotonic()

    def read(self) -> dict[str, int | None]:
        """Return the peak since the last reading, and what is resident now; in bytes."""
        high = high_water_bytes()
        if high > self._floor_bytes + PEAK_RESOLUTION_BYTES:
            self._restart()
        resident, of_files = resident_bytes(os.getpid())
        own = max(0, high - of_files - self._inherited_bytes)
        if time.monotonic() - self._began_at >= WORTH_MEASURING_SECONDS:
            own = max(own, private_bytes(os.getpid()))
        children = high_water_bytes(resource.RUSAGE_CHILDREN)
        self.children_masked = children > max(high, self._children_bytes) + PEAK_RESOLUTION_BYTES
        if self.children_masked:
            self._children_bytes = children
            own += children
        return {"peak_bytes": own, "rss_bytes": resident}

    def _restart(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_bytes(b"5")  # resets the high-water mark
        self._floor_bytes = high_water_bytes()


def high_water_bytes(whose: int = resource.RUSAGE_SELF) -> int:
    """Return the most that was ever resident (of this process on Linux: since the last reset)."""
    peak = resource.getrusage(whose).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe_error(exc: BaseException, home: Path) -> dict[str, Any]:
    """Describe an exception as a `TaskError` in JSON.

    Its attributes `kind`, `hint` and `evidence` are used, if it has them. `home` is the folder that
    a message about a full disk names if the exception names no file.
    """
    kind, hint = getattr(exc, "kind", None), getattr(exc, "hint", None)
    message, evidence = message_of(exc), None
    with contextlib.suppress(TypeError, FrameError):  # any exception may have such an attribute
        if isinstance(said := getattr(exc, "evidence", None), dict):
            evidence = messages.encode_result(said)
    if limits.is_no_room(exc):
        message, hint = f"{message}: {limits.no_room_text()}", limits.HINT
    if disk_space.is_full(exc):
        message, hint = disk_space.full(disk_space.folder_of(exc, home))
    elif isinstance(exc, OSError) and exc.errno == errno.EROFS:
        hint = disk_space.read_only_hint(disk_space.folder_of(exc, home))
    return {
        "type": qualified_name(type(exc)),
        "message": sendable(message, MAX_MESSAGE_CHARS),
        "hint": None if hint is None else sendable(str(hint), MAX_MESSAGE_CHARS),
        "kind": "operation_error" if kind is None else sendable(str(kind), MAX_MESSAGE_CHARS),
        "traceback": sendable("".join(traceback.format_exception(exc)), MAX_TRACEBACK_CHARS),
        "evidence": evidence,
    }


def message_of(exc: BaseException) -> str:
    """Return the exception's message; the type's name when it has none."""
    if isinstance(exc, SystemExit):
        return f"the operation called sys.exit({exc.code!r})"
    try:
        return str(exc) or qualified_name(type(exc))
    except Exception as broken:
        return f"{qualified_name(type(exc))} (its message raised {qualified_name(type(broken))})"


def qualified_name(kind: type) -> str:
    """Return a name such as `ValueError` or `package.module.SomeError`."""
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{prefix}{kind.__qualname__}"


def sendable(text: str, most_chars: int) -> str:
    """Return `text` without lone surrogates, its middle cut out when it is too long."""
    if len(text) > most_chars:
        half = most_chars // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def print_traceback(exc: BaseException) -> None:
    """Print an exception into the task's log, unless the operation raised it to refuse the task."""
    if getattr(exc, "kind", None) is None:
        with contextlib.suppress(Exception):  # the log may be closed, or its disk full
            traceback.print_exception(exc)


def children_are_left() -> bool:
    """Return whether a child process still runs; reaps those that have exited."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


HAS_PARENT_DEATH_SIGNAL = sys.platform == "linux"


def arm_parent_death_signal(descriptor: int) -> None:
    """End this process group by SIGKILL when the writing end closes, or has closed already.

    Call it as the leader of the group. Consumes `descriptor`.
    """
    if not HAS_PARENT_DEATH_SIGNAL:
        threading.Thread(target=_wait_for_end, args=(descriptor,), daemon=True).start()
        return
    own = die_with_writer(descriptor, -os.getpgrp())
    os.close(descriptor)
    # It may have ended before the kernel was asked.
    poll = select.poll()
    poll.register(own, 0)
    if poll.poll(0):
        os.killpg(0, signal.SIGKILL)


def _wait_for_end(descriptor: int) -> None:
    os.read(descriptor, 1)
    os.killpg(0, signal.SIGKILL)


def begin_log(path: str) -> None:
    """Point stdout and stderr at the end of the log; at nothing when it cannot be opened."""
    try:
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a full disk must not fail a task that may be able to do without
        log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if log > 2:  # an operation may have closed 1 or 2, so that the log was opened as one of them
        os.close(log)
    # New streams each time: an operation may have closed those of its process.
    sys.stdout, sys.stderr = (
        open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def end_log(path: str) -> None:
    """Flush: what the task printed is in its log when this returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError):
        if not Path(path).stat().st_size:
            Path(path).unlink()


def main() -> NoReturn:
    """Run a worker as a program of its own, where fork is unsafe (`spawning/source.py`)."""
    config = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pipe = socket.socket(fileno=config["pipe"])
    pipe.set_inheritable(False)
    run_worker(config["name"], pipe, death_pipe=config["death_pipe"], home=config["home"])


if __name__ == "__main__":
    main()
