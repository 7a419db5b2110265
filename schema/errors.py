# SPDX-License-Identifier: Apache-2.0
"""Errors of an environment before it runs, and while it starts.

    EnvironmentsError            `hint` says what to do next; `kind` how the request ends
    ├── InvalidName              a name that cannot be a path and a label
    ├── UnknownSource            nothing of that name, folder or module can be launched
    ├── ManifestError            `openenv.yaml` is missing or wrong: which line and field
    ├── UnknownProvider          no such provider
    ├── InvalidSpec              the options contradict each other
    ├── NotRunning               it has no replicas, or not the one that is asked for
    ├── ReplicaFailed            it exited before it was ready: how, and its last lines
    ├── NotReady                 it did not get ready in time: how long, and its last lines
    └── OperationFailed          the request may work another time
        ├── PreparationFailed    the project's dependencies cannot be installed: uv's last lines
        ├── EngineFailed         an engine is missing, does not answer, or refuses: how to fix it
        ├── NoProcesses          the system allows too few: where that was found, what is left
        ├── PortInUse            by which pid, where that can be known
        ├── GatewayFailed        Envoy is not installed, or cannot be started as it is set up
        └── NotAnswering         nothing answers at the environment's address

A message is one line; the last lines of a log follow it, indented.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any


class HintedError(Exception):
    """Base of errors with a message, and a `hint` that says what to do next."""

    default_hint: str | None = None  # of an error that is raised without one

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint


class EnvironmentsError(HintedError):
    """Base of the errors of an environment."""

    # How the request that met it ends: `invalid` can never work as asked; `operation_error` may.
    kind: str = "invalid"


class InvalidName(EnvironmentsError):
    """A name that cannot be a path and a label."""


class UnknownSource(EnvironmentsError):
    """There is nothing to launch there."""


class ManifestError(EnvironmentsError):
    """`openenv.yaml` cannot be used; says where (file, line, field) and why."""

    def __init__(
        self, path: Path, why: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        message = f"{where}: {f'{field}: ' if field else ''}{why}"
        super().__init__(message, "correct it and launch again")
        self.field = field


class UnknownProvider(EnvironmentsError):
    """There is no provider of that name."""


class InvalidSpec(EnvironmentsError):
    """The requested options contradict each other."""


class NotRunning(EnvironmentsError):
    """The environment has no replicas that could be changed."""


class ReplicaFailed(EnvironmentsError):
    """A replica exited before it was ready, or would fail each session of an update.

    `is_oom`: it ran out of memory. `evidence` is the replica's `ExitReason` as JSON.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        is_oom: bool = False,
        evidence: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.evidence = evidence
        self.kind = "oom_killed" if is_oom else "operation_error"


class NotReady(EnvironmentsError):
    """A replica was not ready in time."""

    kind = "timed_out"


class OperationFailed(EnvironmentsError):
    """The request failed, and may work another time, or elsewhere."""

    kind = "operation_error"


class PreparationFailed(OperationFailed):
    """A project's dependencies could not be installed."""


class EngineFailed(OperationFailed, OSError):
    """An engine is not installed, does not answer, or refuses what was asked of it.

    An `OSError`, too: the daemon tries again what fails of one.
    """

    def __str__(self) -> str:
        """Return the message, without a system call's error number."""
        return self.message


class NoProcesses(OperationFailed):
    """There is no room for its processes."""


class PortInUse(OperationFailed):
    """Another process listens on the port."""


class GatewayFailed(OperationFailed):
    """The gateway cannot be started."""


class NotAnswering(OperationFailed):
    """Nothing (or nothing sensible) answers at an environment's address.

    `status` is the HTTP status of an answer that was not 200.
    """

    def __init__(self, message: str, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Return whether it may answer soon, because it has not refused the request."""
        return self.status is None or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


def with_last_lines(message: str, lines: Iterable[str]) -> str:
    """Append a log's last lines to a message."""
    return "\n".join([message, *(f"    {line}" for line in lines)])
