# SPDX-License-Identifier: Apache-2.0
"""`RayDriver`: the agent's connection to a process that is connected to a Ray cluster.

    agent's threads ──(number, function, arguments)──▶ driver process ──Ray's library──▶ GCS, actors
          ◀──thread "ray answers"──(number, succeeded, result)──┘ a thread for each question

When the cluster is gone, Ray's library blocks, and then ends its process. So it runs in a process
of its own (`cluster.py`), which holds nothing that is not in the cluster. Each question has a time
limit, and none waits for another, since an actor on a lost node never answers.

Failure cases

    the cluster is gone       the driver exits, or is killed if it does not answer in time. Waiting
                              calls raise `EngineGone` at once; a little later, the next question
                              starts another driver, if anything listens at the address
    the agent is killed       its end of the socket closes, and the driver ends
    an unexpected exception   the driver continues; the agent catches `EngineGone`, and tries again
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ..base import EngineError, EngineGone
from .options import check_answers

CALL_SECONDS = 15.0
CONNECT_SECONDS = 60.0  # Ray's library takes seconds to import on a busy machine
QUESTIONS = 128  # at a time
FUNCTIONS = f"{__package__}.cluster"
PAUSE_SECONDS = 1.0  # after a failure, during which all calls raise the same error
# The first one limits how long Ray's library waits for a cluster that is gone.
_RAY_SETTINGS = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayDriver:
    """One driver process at a time, which is started when it is needed, until `close`."""

    def __init__(self, environ: Mapping[str, str] = os.environ, functions: str = FUNCTIONS) -> None:
        """Start no process yet. `functions` names the module of `connect` and all other calls."""
        self._environ = environ
        self._functions = functions
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False
        self._failure: EngineGone | None = None
        self._failed_at = float("-inf")

    def call(self, function: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call one of the functions in the driver process; return its result. Blocks.

        Raises `EngineGone` if the cluster does not answer, `EngineRefused` if it refuses the call.
        """
        process = self._connected()
        try:
            return process.ask(function, arguments, seconds)
        except DriverEnded as exc:
            self._note_failure(exc)
            self._forget(process)
            raise

    def close(self) -> None:
        """End the process, also while it connects; calls that wait raise an error."""
        self._is_closed = True
        if (process := self._process) is not None:  # without the lock, which `_connect` holds
            process.end()

    def _connected(self) -> _Process:
        with self._lock:  # threads that wait share one process
            if self._failure is not None and time.monotonic() - self._failed_at < PAUSE_SECONDS:
                raise self._failure
            if self._is_closed:
                raise _gone()
            try:
                return self._process or self._connect()
            except EngineGone as exc:
                self._note_failure(exc)
                raise

    def _connect(self) -> _Process:
        address = self._environ.get("RAY_ADDRESS", "")
        check_answers(address)  # before the process, which takes seconds to import Ray
        self._process = started = _Process(self._environ, self._functions)
        try:
            if self._is_closed:  # `close` may have looked before there was a process
                raise _gone()
            started.ask("connect", (address,), CONNECT_SECONDS)
        except EngineGone:
            self._process = None
            started.end()
            raise
        return started

    def _note_failure(self, failure: EngineGone) -> None:
        self._failure, self._failed_at = failure, time.monotonic()

    def _forget(self, process: _Process) -> None:
        process.end()
        with self._lock:
            if self._process is process:
                self._process = None


class DriverEnded(EngineGone):
    """The driver process has ended, or does not answer."""


class _Process:
    """One driver process, to which several threads put questions at once."""

    def __init__(self, environ: Mapping[str, str], functions: str) -> None:
        self._pipe, its = Pipe()
        try:
            program = ["-m", f"{__package__}.driver", functions, str(its.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", *program],
                env={**environ, **_RAY_SETTINGS},
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            its.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}  # by the numbers of questions
        self._has_ended = False
        threading.Thread(target=self._read, name="ray answers", daemon=True).start()

    def ask(self, function: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Return the answer to one request; raises `DriverEnded` if it does not come in time.

        Also raises the `EngineGone` or `EngineRefused` of the function in the driver.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                raise _gone()
            number = next(self._numbers)
            self._asked[number] = answer
            with contextlib.suppress(OSError):  # the driver has ended: `_read` notices
                self._pipe.send((number, function, arguments))
        try:
            return answer.result(seconds)
        except TimeoutError as exc:
            raise DriverEnded(f"Ray has not answered within {seconds:g} s", _STATUS_HINT) from exc

    def end(self) -> None:
        """Kill the process; calls that wait raise an error."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Pass answers on, in a thread of its own, until the driver has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, has_worked, result = self._pipe.recv()
                answer = self._asked.pop(number)
                answer.set_result(result) if has_worked else answer.set_exception(result)
        with self._lock:
            self._has_ended = True
        for answer in self._asked.values():
            answer.set_exception(_gone())
        self._pipe.close()


_STATUS_HINT = "see whether it runs: ray status"


def _gone() -> DriverEnded:
    return DriverEnded("Ray does not answer: its cluster is gone, or not ours", _STATUS_HINT)


def answer_questions(module: str, pipe: Connection) -> NoReturn:
    """Answer the agent's questions, in the driver process, until the agent has ended."""
    functions = importlib.import_module(module)
    threads = ThreadPoolExecutor(QUESTIONS, "question")
    lock = threading.Lock()

    def answer(number: int, call: Callable[[], Any]) -> None:
        try:
            message = (number, True, call())
        except EngineError as exc:
            message = (number, False, exc)
        except Exception as exc:  # Ray raises many kinds
            message = (number, False, EngineGone(f"{type(exc).__name__}: {exc}"))
        with lock, contextlib.suppress(OSError):
            pipe.send(message)

    while True:
        try:
            number, function, arguments = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # Ray's shutdown would wait for a cluster that may be gone
        call = partial(getattr(functions, function), *arguments)
        if function == "connect":  # Ray requires the main thread for it
            answer(number, call)
        else:
            threads.submit(answer, number, call)


if __name__ == "__main__":
    os.dup2(2, 1)  # what Ray prints goes to the agent's log
    answer_questions(sys.argv[1], Connection(int(sys.argv[2])))
