# SPDX-License-Identifier: Apache-2.0
"""The executor's errors.

    ExecutorError
      ├── PlanError          the machine is too small for one LONG and one SHORT worker
      ├── NoRoom             submitted although `room()` said 0
      ├── NotRunning         submitted before `start()` or after `stop()`
      └── FrameError         a pipe carried something that is no frame

    TaskCancelled            raised *inside* a worker, in the operation; not an ExecutorError

What happens to a task (it raised, its worker died, …) is no error of the executor: it is an event
(`messages.py`).
"""

from __future__ import annotations

from ..schema.errors import HintedError


class ExecutorError(Exception):
    """Base of everything the executor raises at its callers."""


class PlanError(ExecutorError, HintedError):
    """No working plan exists within the limits; `hint` says what to do."""


class NoRoom(ExecutorError):
    """Every worker that may exist has a task; ask `room()` before submitting."""


class NotRunning(ExecutorError):
    """The executor has not been started, or has been stopped."""


class FrameError(ExecutorError):
    """A pipe carried something that is not one of our frames."""


class TaskCancelled(BaseException):
    """Raised in a worker's main thread while its operation runs: the task was cancelled.

    A `BaseException`, as `KeyboardInterrupt` is one: an operation's `except Exception` must not
    swallow it. An operation may catch it to clean up, and has until the grace ends.
    """
