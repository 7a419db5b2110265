# SPDX-License-Identifier: Apache-2.0
"""Errors between a client and the daemon.

ClientError
├── DaemonUnreachable     there is no daemon that answers
│   ├── DaemonNotStarted  it was started and cannot run; its log has the reason
│   ├── OtherVersion      it answers, but is of another version than this client
│   ├── InstallationGone   it answers, but its installation was removed or replaced
│   └── ConnectionLost    it exited during a call
├── ApiRefused            it answered with an error
│   └── NotFound          no request, environment or log is called so
├── RequestFailed         the request was accepted, and did not succeed
└── SessionError          a session of the SDK could not be opened, was lost, or refused a message
"""

from __future__ import annotations

from typing import Any

from ..schema.errors import HintedError


class ClientError(HintedError):
    """Base of all errors of this package. `hint` says what to do next."""

    kind = "unreachable"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        if hint:
            self.add_note(hint)  # tracebacks show it

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON, in the format of the daemon's API."""
        return {"error": {"kind": self.kind, "message": self.message, "hint": self.hint}}


class DaemonUnreachable(ClientError):
    """There is no daemon that answers."""


class DaemonNotStarted(DaemonUnreachable):
    """The daemon was started, and cannot run."""

    def __init__(self, kind: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.kind = kind


class OtherVersion(DaemonUnreachable):
    """The daemon is of another version than this client."""


class InstallationGone(DaemonUnreachable):
    """The installation that the daemon runs from was removed or replaced."""


class ConnectionLost(DaemonUnreachable):
    """The daemon exited during a call."""


class ApiRefused(ClientError):
    """The daemon answered with an error: `kind` and `details` are the API's own."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", f"HTTP {status}")), error.get("hint"))
        self.status = status
        self.kind = str(error.get("kind", "internal"))
        self.details = error

    def to_json(self) -> dict[str, Any]:
        """Return the error as the daemon sent it."""
        return {"error": self.details}


class NotFound(ApiRefused):
    """There is no request, environment or log of this name."""


class RequestFailed(ClientError):
    """The request was accepted, and did not succeed. `request` is its JSON."""

    def __init__(self, request: dict[str, Any]) -> None:
        error = request.get("error") or {}
        message = error.get("message") or f"{request['label']} was {request['state'].lower()}"
        super().__init__(message, error.get("hint"))
        self.request = request


class SessionError(ClientError):
    """A session could not be opened, was lost, or refused a message.

    `code` is the OpenEnv error code if the server answered with an error; otherwise None. Once a
    session has ended, each call raises the reason: the same message, code and hint.
    """

    def __init__(self, message: str, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.code = code
