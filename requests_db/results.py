# SPDX-License-Identifier: Apache-2.0
"""What the stores answer, by name. `events` are rows already written, ready to be pushed."""

from __future__ import annotations

from dataclasses import dataclass

from .records import Environment, Event, Request

Events = tuple[Event, ...]


# Submitting.


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is written, and durable."""

    request: Request
    events: Events


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A request with this idempotency key exists; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A live environment has the name; nothing was written."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class QueueFull:
    """So many requests of its schedule wait already; nothing was written."""

    pending: int


SubmitResult = Submitted | Duplicate | NameTaken | QueueFull


# Cancelling and finding.


@dataclass(frozen=True, slots=True)
class CancelledPending:
    """It had not begun, and never will."""

    request: Request
    events: Events


@dataclass(frozen=True, slots=True)
class CancelRunning:
    """It runs; that somebody wants it cancelled is written. Its worker has yet to be told."""

    request: Request


@dataclass(frozen=True, slots=True)
class AlreadyFinal:
    """It had ended before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class NotFound:
    """No request has this id, or an id that begins so."""

    id: str


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several ids begin so; the newest of them."""

    ids: tuple[str, ...]


CancelResult = CancelledPending | CancelRunning | AlreadyFinal | NotFound
GetResult = Request | NotFound | Ambiguous


# Dispatching.


@dataclass(frozen=True, slots=True)
class Claim:
    """What the dispatcher may now run, in the order in which it should."""

    requests: tuple[Request, ...]
    events: Events


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of the requests that a lost daemon left running."""

    requeued: tuple[Request, ...]
    failed: tuple[Request, ...]
    cancelled: tuple[Request, ...]  # somebody had asked for it already
    events: Events
