# SPDX-License-Identifier: Apache-2.0
"""The stores' answers, by name. `events` are rows already written, ready to be published."""

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
    """The request was pending, and is cancelled."""

    request: Request
    events: Events


@dataclass(frozen=True, slots=True)
class CancelRunning:
    """The request runs, and is marked to be cancelled; its worker has yet to be ended."""

    request: Request


@dataclass(frozen=True, slots=True)
class AlreadyFinal:
    """The request had ended before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class NotFound:
    """No request has this id, or an id that begins so."""

    id: str


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Several ids have this prefix: the newest of them."""

    ids: tuple[str, ...]


CancelResult = CancelledPending | CancelRunning | AlreadyFinal | NotFound
GetResult = Request | NotFound | Ambiguous


# Dispatching.


@dataclass(frozen=True, slots=True)
class Claim:
    """Requests that are RUNNING now, in the order in which to start them."""

    requests: tuple[Request, ...]
    events: Events


@dataclass(frozen=True, slots=True)
class Recovery:
    """The requests that a lost daemon left running, by their new state."""

    requeued: tuple[Request, ...]
    failed: tuple[Request, ...]
    cancelled: tuple[Request, ...]  # this was asked for before
    events: Events
