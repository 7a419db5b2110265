# SPDX-License-Identifier: Apache-2.0
"""Sends a handshake on to another replica, where a gateway is in front that can try one.

    gateway ──handshake: attempt 1, 2 replicas may be asked──▶ this one has no room ──503──▶ gateway
       └─────the same: attempt 2──▶ another one, where the client has its session, or waits for one

The answer says in a header that nothing was begun, so that the request may be sent again. The last
replica that may be asked has the client wait as it would have waited without a gateway.
"""

from __future__ import annotations

from http import HTTPStatus

from ...system.connection_limit import FULL, closing_answer
from ..protocol import ATTEMPT_HEADER, ATTEMPTS_HEADER, RETRY_HEADER
from .handshake import parse_upgrade

_RETRY = f"{RETRY_HEADER}: 1\r\n"


def may_ask_another(head: bytes) -> bool:
    """Whether the gateway that sent a handshake may ask another replica."""
    upgrade = parse_upgrade(head)
    if upgrade is None:
        return False
    attempt, most = (
        upgrade.headers.get(name.lower().encode(), b"0")
        for name in (ATTEMPT_HEADER, ATTEMPTS_HEADER)
    )
    return attempt.isdigit() and most.isdigit() and 0 < int(attempt) < int(most)


def try_another(detail: str = FULL) -> bytes:
    """Return the answer to a request of which nothing was begun, nor will be here."""
    return closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers=_RETRY)
