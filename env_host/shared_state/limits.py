# SPDX-License-Identifier: Apache-2.0
"""How much may be in flight between a shard and the state process, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from ...system.units import MB


@dataclass(frozen=True)
class Limits:
    """The limits of one shard's connection."""

    max_calls: int = 1024  # sent and not answered; the others wait in the shard
    max_bytes: int = 32 * MB  # of bodies in those; a larger body goes alone
    max_waiting: int = 65_536  # calls that wait to be sent; one more is refused at once
    connect_seconds: float = 10.0  # for the first connection
    greeting_seconds: float = 5.0  # between connect and HELLO, or HELLO and WELCOME
    retry_seconds: float = 0.05  # between two attempts to connect again

    def has_room(self, calls: int, in_flight_bytes: int, body_bytes: int) -> bool:
        """Return whether a call with such a body may be sent now."""
        if calls == 0:
            return True
        return calls < self.max_calls and in_flight_bytes + body_bytes <= self.max_bytes


DEFAULT_LIMITS = Limits()
