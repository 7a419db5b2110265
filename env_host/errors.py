# SPDX-License-Identifier: Apache-2.0
"""The errors of the env host.

HostError
├── StartError              the environment cannot be served: exit code `EXIT_FAILED_TO_START`
│   ├── ConfigError         its configuration is missing or broken
│   ├── LoadError           the environment does not import
│   ├── NotConcurrent       several sessions in a process requested for a class that allows one
│   └── ShardFailed         a process that was to serve could not start
├── NotReset                a step before the first reset: an error frame; the session continues
├── BranchRefused           no branch, checkpoint or restore: an error frame; the session continues
└── SessionError            ends one session: an error frame with `code`, then the close
    ├── CapacityReached     no room for another session
    ├── FactoryFailed       the environment's constructor raised
    ├── CallTimedOut        a call for one HTTP request took too long
    ├── UnknownSession      `?session_id=` names no session, or one that is in use or starting
    └── SessionEnded        we ended it: idle, out of time, or stopping
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class WSErrorCode(StrEnum):
    """The `code` of an error frame, as in upstream's `openenv` 0.10.0, with five of our own."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"
    SESSION_NOT_RESET = "SESSION_NOT_RESET"
    BRANCH_UNSUPPORTED = "BRANCH_UNSUPPORTED"
    BRANCH_MEMORY = "BRANCH_MEMORY"
    BRANCH_DIVERGED = "BRANCH_DIVERGED"  # of the SDK: a replayed answer differs
    CHECKPOINT_UNKNOWN = "CHECKPOINT_UNKNOWN"


class HostError(Exception):
    """Base of everything the env host raises itself."""


class StartError(HostError):
    """The env host cannot serve this environment."""


class ConfigError(StartError):
    """The configuration is missing, or is invalid."""


class LoadError(StartError):
    """The environment cannot be imported, or what was imported cannot be served."""


class NotConcurrent(StartError):
    """More than one session at a time was requested for a class that does not support it."""

    def __init__(self, class_name: str, max_sessions: int) -> None:
        super().__init__(
            f"{class_name} does not set SUPPORTS_CONCURRENT_SESSIONS = True, so one process can "
            f"serve one session at a time, and {max_sessions} were asked for. Launch it without "
            "--no-isolate, with --max-sessions 1, with more replicas, or mark the class if "
            "each instance keeps its state to itself."
        )


class ShardFailed(StartError):
    """A process that was to serve could not start; `log_tail` is the end of its output."""

    def __init__(self, message: str, log_tail: list[str]) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class NotReset(HostError):
    """A step is refused: the session was not reset yet; it may have replaced a lost session."""

    def __init__(self) -> None:
        super().__init__(
            "This session is new and was not reset. If you had one before, it was lost with the "
            "process that served it, and so is its episode. Call reset to begin an episode. An "
            "environment whose steps need no reset says `reset_first: false` in openenv.yaml, or "
            "RESET_FIRST = False in its class."
        )


class BranchRefused(HostError):
    """A branch, a checkpoint or a restore is refused; the session is untouched."""

    def __init__(self, message: str, code: WSErrorCode, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class SessionError(HostError):
    """A session cannot start or go on; `code` and `details` go into the error frame."""

    code = WSErrorCode.SESSION_ERROR

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class CapacityReached(SessionError):
    """As many sessions as may run at once are in use."""

    code = WSErrorCode.CAPACITY_REACHED

    def __init__(self, active_sessions: int, max_sessions: int) -> None:
        text = f"All sessions are in use: {active_sessions} of {max_sessions}."
        super().__init__(text, active_sessions=active_sessions, max_sessions=max_sessions)


class FactoryFailed(SessionError):
    """The environment could not be created, because its factory raised `cause`, or that line."""

    code = WSErrorCode.FACTORY_ERROR

    def __init__(self, factory_name: str, cause: BaseException | str) -> None:
        if isinstance(cause, BaseException):
            cause = f"{type(cause).__name__}: {cause}"
        super().__init__(f"{factory_name} could not be created: {cause}", factory_name=factory_name)


class CallTimedOut(SessionError):
    """A call of the environment for one HTTP request took too long."""

    def __init__(self, what: str, limit: str, memory: str = "") -> None:
        super().__init__(
            f"{what} did not finish within {limit}; `--step-timeout` at the launch "
            f"changes this limit.{memory}"
        )


class UnknownSession(SessionError):
    """The session does not exist, or cannot be attached to or used now."""


class SessionEnded(SessionError):
    """The env host ended the session."""

    def __init__(self, reason: str, close_code: int) -> None:
        super().__init__(reason)
        self.close_code = close_code
