# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between a session and the state that it shares.

HostError
├── WorldError                what a call of `self.world` raises: it fails the step alone
│   ├── WorldCallFailed       the state's method raised
│   ├── WorldTimeout          no reply in time: the call may have had effects
│   │   └── WorldBusy         it was never sent: too much is in flight
│   ├── BodyTooLarge          more bytes than one call may carry; it was not sent
│   └── WorldLost             the state is gone, and with it what the session did there
├── SessionEnded
│   └── WorldLost             … so the session is ended too: error frame, close 1011
├── WireError                 the peer sent what is no frame: its connection is closed
└── StartError
    └── StateFailed           the state process did not start
"""

from __future__ import annotations

from ..errors import HostError, SessionEnded, StartError

LOST_CLOSE = 1011  # WebSocket: the server met a condition that prevents it from going on


class WorldError(HostError):
    """A call of the shared state did not succeed."""


class WorldCallFailed(WorldError):
    """The method itself raised, or there is none of that name.

    `kind` is the name of the exception's type, as the state process knows it.
    """

    def __init__(self, method: str, kind: str, message: str) -> None:
        super().__init__(f"world.{method}: {kind}: {message}")
        self.method = method
        self.kind = kind


class WorldTimeout(WorldError):
    """No reply within the call's time; it is not sent again, as it may have had effects."""


class WorldBusy(WorldTimeout):
    """The call was not sent: those before it fill what may be in flight."""


class BodyTooLarge(WorldError):
    """More bytes than one call or one reply may carry."""


class WorldLost(WorldError, SessionEnded):
    """The state process, or the way to it, is gone. Nothing is known of calls in flight."""

    def __init__(self, reason: str) -> None:
        SessionEnded.__init__(self, reason, LOST_CLOSE)


class WireError(HostError):
    """What arrived is not a frame of ours, or not one that may come here."""


class StateFailed(StartError):
    """The state process ended before it was ready."""
