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
└── WireError                 the peer sent what is no frame: its connection is closed
"""

from __future__ import annotations

from ...system.net.websocket import INTERNAL_ERROR_CLOSE
from ..errors import HostError, SessionEnded


class WorldError(HostError):
    """A call of the shared state failed."""


class WorldCallFailed(WorldError):
    """The method itself raised, or there is no method of that name."""


class WorldTimeout(WorldError):
    """There was no reply in time; the call is not sent again, as it may have had effects."""


class WorldBusy(WorldTimeout):
    """The call was not sent: too many or too large calls are in flight."""


class BodyTooLarge(WorldError):
    """A call or reply has more bytes than allowed."""


class WorldLost(WorldError, SessionEnded):
    """The state process, or the way to it, is gone. Nothing is known of calls in flight."""

    def __init__(self, reason: str) -> None:
        SessionEnded.__init__(self, reason, INTERNAL_ERROR_CLOSE)


class WireError(HostError):
    """The peer sent no valid frame, or one that is not allowed here."""
