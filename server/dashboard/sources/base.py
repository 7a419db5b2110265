# SPDX-License-Identifier: Apache-2.0
"""What the feed asks of a source of entities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ....requests_db.records import Event
from ...api.dependencies import Dependencies
from ..live_state import LiveState


@dataclass(frozen=True, slots=True)
class Turn:
    """Why the sources are asked to look."""

    now: float  # since the epoch
    events: tuple[Event, ...] = ()  # since the last turn
    is_tick: bool = False  # a second has passed
    is_first: bool = False  # look at everything: nothing is known, or events were dropped

    def has(self, kind: str) -> bool:
        """Whether such an event has happened, or may have."""
        return self.is_first or any(event.kind == kind for event in self.events)


class Source(Protocol):
    """Reads parts of the daemon, and puts what they are now as entities."""

    def __init__(self, deps: Dependencies) -> None:
        """Make one for the time in which somebody looks."""

    async def refresh(self, state: LiveState, turn: Turn) -> None:
        """Put what has changed."""
