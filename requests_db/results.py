# SPDX-License-Identifier: Apache-2.0
"""What transactions answer, by name. `events` are rows already written, ready to be published."""

from __future__ import annotations

from dataclasses import dataclass

from ..schema.states import RequestState
from .records import Environment, Event, Generation, Request

Events = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is written, and durable."""

    request: Request
    events: Events
    # Running launches that were called off: their workers have yet to be ended.
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The same was asked for with this idempotency key before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Something else was asked for with this idempotency key before; nothing was written."""

    request: Request


@dataclass(frozen=True, slots=True)
class NameTaken:
    """A live environment has the name; nothing was written."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class OtherSource:
    """An environment of the name runs from another source, and an update was not asked for."""

    environment: Environment


@dataclass(frozen=True, slots=True)
class BeingUpdated:
    """An environment of the name is being updated already; nothing was written."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The queue of its schedule is full; nothing was written."""

    pending: int


@dataclass(frozen=True, slots=True)
class CannotChange:
    """The environment does not serve, or a request is changing it; nothing was written."""

    environment: Environment
    change: Request | None = None


Refusal = CannotChange | Duplicate | KeyReused | NameTaken | OtherSource | BeingUpdated | QueueFull
SubmitResult = Submitted | Refusal


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A request that was to be cancelled.

    One that was PENDING is cancelled; one that was RUNNING is marked, and its worker has yet to be
    ended; of one that had ended, nothing was written.
    """

    request: Request
    before: RequestState
    events: Events = ()

    @property
    def is_done(self) -> bool:
        """Whether this call has cancelled it, for good."""
        return self.before is RequestState.PENDING

    @property
    def is_under_way(self) -> bool:
        """Whether it runs: it may still end in another way."""
        return self.before is RequestState.RUNNING


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
