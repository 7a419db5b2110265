# SPDX-License-Identifier: Apache-2.0
"""What the API refuses, and with which HTTP status.

ApiError
├── TooLarge        413  a body beyond what any call needs
├── Invalid         422  the payload cannot be right
├── Unauthorized    401  no token, or not ours
├── Forbidden       403  a foreign Host or Origin
├── NotFound        404  no such request, environment or log
├── AmbiguousId     409  a prefix that fits several requests
├── NameTaken       409  a live environment has the name
├── QueueFull       429  too many requests wait already
└── StorageFailed   507  the disk is full, or the state folder cannot be written

DaemonError         the daemon cannot start; reported through the ready pipe
"""

from __future__ import annotations

from typing import Any, ClassVar


class ApiError(Exception):
    """Base of everything the API answers with `{"error": {...}}`."""

    kind: ClassVar[str] = "internal"
    status: ClassVar[int] = 500

    def __init__(self, message: str, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {"kind": self.kind, "message": self.message, "hint": self.hint, **self.details}
        return {"error": error}


class Invalid(ApiError):
    """The payload cannot be right."""

    kind = "invalid"
    status = 422


class TooLarge(ApiError):
    """A body beyond what any call needs."""

    kind = "too_large"
    status = 413


class Unauthorized(ApiError):
    """No token, or not ours."""

    kind = "unauthorized"
    status = 401


class Forbidden(ApiError):
    """A foreign Host or Origin: a web page must not reach the daemon."""

    kind = "forbidden"
    status = 403


class NotFound(ApiError):
    """No such request, environment or log."""

    kind = "not_found"
    status = 404


class AmbiguousId(ApiError):
    """A prefix that fits several requests."""

    kind = "ambiguous"
    status = 409


class NameTaken(ApiError):
    """A live environment has the name."""

    kind = "name_taken"
    status = 409


class QueueFull(ApiError):
    """Too many requests wait already."""

    kind = "queue_full"
    status = 429


class StorageFailed(ApiError):
    """The disk is full, or the state folder cannot be written."""

    kind = "storage"
    status = 507


class DaemonError(Exception):
    """The daemon cannot start.

    `kind` is one of `already_running`, `port_in_use`, `state_unwritable`, `database`,
    `too_small`, `no_processes`, `invalid`.
    """

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint

    def to_json(self) -> dict[str, Any]:
        """The line of the ready pipe."""
        error = {"kind": self.kind, "message": self.message, "hint": self.hint}
        return {"ready": False, "error": error}
