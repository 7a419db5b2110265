# SPDX-License-Identifier: Apache-2.0
"""How much may be in flight between a shard and the state process, and for how long."""

from __future__ import annotations

from ...system.units import MB

MAX_CALLS = 1024  # of one shard, sent and not answered; the others wait in the shard
MAX_BYTES = 32 * MB  # of bodies in those; a larger body goes alone
MAX_WAITING = 65_536  # calls that wait to be sent; one more is refused at once
CALL_SECONDS = 10.0  # of one call, its wait included, unless the caller says otherwise
CONNECT_SECONDS = 10.0  # for the first connection; also how long a new session waits for one
GREETING_SECONDS = 5.0  # between connect and HELLO, or HELLO and WELCOME
RETRY_SECONDS = 0.05  # between two attempts to connect again


def has_room(calls: int, in_flight_bytes: int, body_bytes: int) -> bool:
    """Return whether a call with such a body may be sent now."""
    if calls == 0:
        return True
    return calls < MAX_CALLS and in_flight_bytes + body_bytes <= MAX_BYTES
