# SPDX-License-Identifier: Apache-2.0
"""How a browser signs in to the daemon, and how its calls are told from those of other pages.

    openenv dashboard ──token──▶ POST /v1/dashboard/link ──▶ http://127.0.0.1:8585/#<code>
    the page ──code, once──▶ POST /dashboard/session ──▶ cookie, and the session's key
    every call of the page: cookie, `X-Openenvd-Key: <key>`, and, when it changes something,
    an `Origin` that is the daemon's own

The code is in the fragment, which browsers send to nobody; the page removes it from the address
before anything else. It is good once, and for a few minutes.

The cookie alone is good for nothing. Cookies know no ports: a browser sends that of 127.0.0.1 to
every server on this machine, those of environments among them, to which `SameSite` is no bar since
they are the same site. The key is kept where the page's own origin alone can read it, so what
another server sees of the cookie does not let it in, and no foreign page can send the header.
Cookie and key are both signed with the daemon's token: they survive a restart of the daemon, and
end with their time, or with the token (docs/decisions/0028).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

LINK_SECONDS = 300.0  # a link that nobody has used until then is good for nothing
SESSION_SECONDS = 7 * 24 * 3600
MAX_LINKS = 32  # that wait to be used; more than a person asks for
KEY_HEADER = b"x-openenvd-key"


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """What a browser that has signed in is given."""

    cookie: str  # the value of `Set-Cookie`
    key: str


class BrowserSessions:
    """One-time codes, and the sessions that begin with them."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(b"openenvd browser sessions\0" + token.encode()).digest()
        self._clock = clock
        self._codes: dict[str, float] = {}  # until when each is good
        # Of this home, as cookies of several daemons lie side by side.
        self.cookie_name = f"openenvd-{self._signed('name')[:8]}"

    def new_code(self) -> str:
        """A code for one sign-in."""
        now = self._clock()
        self._codes = {code: ends for code, ends in self._codes.items() if ends > now}
        while len(self._codes) >= MAX_LINKS:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + LINK_SECONDS
        return code

    def begin(self, code: str) -> BrowserSession | None:
        """The session that this code begins; None when it is used, too old or wrong."""
        ends = self._codes.pop(code, 0.0)
        if ends <= self._clock():
            return None
        text = f"{self._clock() + SESSION_SECONDS:.0f}.{secrets.token_urlsafe(12)}"
        value = f"{text}.{self._signed('cookie', text)}"
        attributes = f"Path=/; Max-Age={SESSION_SECONDS}; HttpOnly; SameSite=Strict"
        return BrowserSession(f"{self.cookie_name}={value}; {attributes}", self._key_of(text))

    def is_valid(self, cookie_header: bytes, key: bytes) -> bool:
        """Whether a call carries the cookie and the key of a session that has not ended."""
        text, _, signature = self._cookie_in(cookie_header).rpartition(".")
        ends = text.partition(".")[0]
        return (
            hmac.compare_digest(signature, self._signed("cookie", text))
            and hmac.compare_digest(key, self._key_of(text).encode())
            and ends.isdigit()
            and int(ends) > self._clock()
        )

    def _cookie_in(self, header: bytes) -> str:
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie_name and value.isascii():
                return value
        return ""

    def _key_of(self, text: str) -> str:
        return self._signed("key", text)

    def _signed(self, *parts: str) -> str:
        digest = hmac.digest(self._secret, "\0".join(parts).encode(), "sha256")
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
