# SPDX-License-Identifier: Apache-2.0
"""Which values are secrets by their names or their form, and are hidden wherever they are shown."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"token|secret|passw|passphrase|pwd|credential|private|auth|cookie|dsn|jwt"
    r"|conn(?:ection)?_?str(?:ing)?|(?<!by)(?<!com)pass(?:_|\d*$)"
    r"|(?:^|_)(?:pat|(?:api)?keys?)(?:_|\d*$)",
    re.IGNORECASE,
)
_URL_PARAMETER = re.compile(r"([?&]([^=&\s]{1,128})=)[^&#\s]+")
# A password in an address, or a user's name that is long enough to be a token. A password may have
# any character: all up to the last `@` is hidden.
_URL_CREDENTIALS = re.compile(r"(://)(?:[^/?#@\s:]*:\S*|[^/?#@\s]{16,})@")
# Where no `@` follows, the pattern above would read to the end for each `://`.
_UP_TO_LAST_AT = re.compile(r"(?<!\S)\S+@")


def hide_credentials(value: Any) -> Any:
    """Hide passwords and tokens in URLs: of a policy, a source, or what a rollout plays in."""
    if isinstance(value, list | tuple):
        return [hide_credentials(item) for item in value]
    if not isinstance(value, str) or "://" not in value:
        return value
    hidden = _UP_TO_LAST_AT.sub(_without_credentials, value)
    return _URL_PARAMETER.sub(_without_secret, hidden)


def _without_credentials(word: re.Match[str]) -> str:
    return _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", word[0])


def _without_secret(parameter: re.Match[str]) -> str:
    return parameter[1] + REDACTED if _SECRET_NAME.search(parameter[2]) else parameter[0]


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable's value is to be hidden."""
    return bool(_SECRET_NAME.search(name)) or hide_credentials(value) != value
