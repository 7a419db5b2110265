# SPDX-License-Identifier: Apache-2.0
"""The API's refusals, with their HTTP statuses, and the reasons why a daemon does not start."""

from __future__ import annotations

from typing import Any, ClassVar

from ..schema.errors import HintedError


class ApiError(HintedError):
    """Base of everything the API answers with `{"error": {...}}`."""

    kind: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init_subclass__(cls, *, kind: str, status: int) -> None:
        cls.kind, cls.status = kind, status

    def __init__(self, message: str, hint: str | None = None, **details: Any) -> None:
        super().__init__(message, hint)
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {"kind": self.kind, "message": self.message, "hint": self.hint, **self.details}
        return {"error": error}


class Invalid(ApiError, kind="invalid", status=422):
    """The payload cannot be right."""


class TooLarge(ApiError, kind="too_large", status=413):
    """A body beyond what any call needs."""


class Unauthorized(ApiError, kind="unauthorized", status=401):
    """No token, or not ours."""


class Forbidden(ApiError, kind="forbidden", status=403):
    """A foreign Host or Origin: a web page must not reach the daemon."""


class NotFound(ApiError, kind="not_found", status=404):
    """No such request, environment or log."""


class AmbiguousId(ApiError, kind="ambiguous", status=409):
    """A prefix that fits several requests."""


class NameTaken(ApiError, kind="name_taken", status=409):
    """A live environment has the name."""


class CannotChange(ApiError, kind="cannot_change", status=409):
    """The environment does not serve, or another request is changing it."""


class KeyReused(ApiError, kind="key_reused", status=409):
    """An idempotency key that came with another operation or payload before."""


class QueueFull(ApiError, kind="queue_full", status=429):
    """Too many requests wait already."""


class Unreadable(ApiError, kind="unreadable", status=500):
    """The process that reads the folder of a rollout was ended, or took too long."""


class StorageFailed(ApiError, kind="storage", status=507):
    """The disk is full, or the state folder cannot be written."""


class DaemonError(HintedError):
    """The daemon cannot start; reported through the ready pipe.

    `kind` is one of `already_running`, `port_in_use`, `state_unwritable`, `database`,
    `too_small`, `no_processes`, `invalid`.
    """

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.kind = kind

    def to_json(self) -> dict[str, Any]:
        """The line of the ready pipe."""
        error = {"kind": self.kind, "message": self.message, "hint": self.hint}
        return {"ready": False, "error": error}
