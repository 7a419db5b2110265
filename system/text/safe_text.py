# SPDX-License-Identifier: Apache-2.0
"""Makes foreign text safe to show: without control sequences, and without secrets.

A terminal executes escape sequences in what it shows: they move the cursor, rewrite what stands
above, set the title, or put text into the clipboard. `plain` removes all of them; `coloured` leaves
those of colours and styles (SGR). Tabs and the ends of lines stay.

Source: ECMA-48, 5th edition, sections 5.3 to 5.6 and 8.3.117.

Values that are secrets by their names or their form are hidden wherever they are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

_COLOUR = r"\x1b\[[0-9;:]*m"
# The start of a control string and its content. The start of another string ends it, so that no
# character is scanned as part of several strings.
_STRING = r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\x9d\x90\x98\x9e\x9f]*"
_SEQUENCE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # a control sequence
    rf"|{_STRING}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"  # any other, or the beginning of a string that does not end
)
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
_LINE_END = re.compile(r"\r+\n?")  # a lone return would write over the line
_ALL = re.compile(f"{_SEQUENCE}|{_CONTROL}")
_ALL_BUT_COLOURS = re.compile(f"({_COLOUR})|{_SEQUENCE}|{_CONTROL}")
_BEGUN = re.compile(rf"(?:(?:\x1b\[|\x9b)[0-?]*[ -/]*|{_STRING}\x1b?|\x1b[ -/]*|\r+)\Z")
_MAX_KEPT = 4096  # most characters of an unfinished sequence that are held back


def plain(text: str) -> str:
    """Return the text without escape sequences and control characters."""
    return text if text.isprintable() else _ALL.sub("", _LINE_END.sub("\n", text))


def coloured(text: str) -> str:
    """Return the text with colours and styles, and no other escape sequences."""
    if text.isprintable():
        return text
    return _ALL_BUT_COLOURS.sub(lambda found: found[1] or "", _LINE_END.sub("\n", text))


def safe_pieces(pieces: Iterable[str], *, keeps_colours: bool) -> Iterator[str]:
    """Make text safe that arrives in pieces, which may end inside an escape sequence."""
    clean, rest = coloured if keeps_colours else plain, ""
    for piece in pieces:
        text, rest = rest + piece, ""
        begun = _BEGUN.search(text, max(0, len(text) - _MAX_KEPT))
        if begun is not None:
            text, rest = text[: begun.start()], begun[0]
        yield clean(text)
    yield clean(rest)


REDACTED = "***"
# Compiled when first used (`re` keeps them): 3 ms that most commands do not need.
_HIDDEN_NAME = (
    r"(?i)token|secret|passw|passphrase|passcode|pwd|credential|private|auth|bearer|webhook|cookie"
    r"|dsn|jwt|hmac|mnemonic|seed_?phrase|encrypt|kubeconfig|netrc|keystore|keytab|signing|unseal|totp"
    r"|conn(?:ection)?_?str(?:ing)?|(?<!by)(?<!com)pass(?:_|\d*$)"
    r"|(?:^|_)(?:sig(?:nature)?|pin|otp|mfa|pem|salt|hook|login|licen[cs]e)(?:_|\d*$)"
    r"|(?:(?<!com)(?<!ex)(?<!s)pat|(?<!kan)sas|ps?w|pswd|psk|tkn|(?<!sa)creds?)(?:_|\d*$)"
    r"|[cx]srf|session_?id|(?:access|recovery|backup)_?codes?|(?:api|access|secret|account|master)_?key|keys?(?:_|\d*$)"
)
# Names that are shown although they contain one of these words.
_SHOWN_NAME = (
    r"(?i)(?:^|_)(?:(?:max|min|num|n|new|input|output|total|prompt|completion)_(?:\w+_)?tokens"
    r"|tokenizers?(?:_\w+)?|tokens_per_\w+|tokens?_(?:limit|budget|count)|authors?(?:_\w+)?|ssh_auth_sock|xauthority"
    r"|(?:public|primary|foreign|sort|partition|row|hot|mon|tur|don|key)_?keys?(?:_\w+)?)$"
)
# Names of values that look random, but are not secrets.
_DIGEST_NAME = (
    r"(?i)sha\d*|commit|digest|checksum|hash|revision|version|build|image|(?:^|_)(?:uu)?ids?$"
    r"|path|dirs?$|folder|file|model|checkpoint|dataset"
)
# A word of letters and digits as long as a randomly generated key, optionally after a number and a
# colon. Base64 with slashes must be the whole value.
_RANDOM = (
    r"(?:\d{6,}:)?(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9+=_-]*[A-Za-z0-9+=]{20}"
    r"|(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[A-Za-z0-9+][A-Za-z0-9+/]{37,}={0,2}$"
)
_URL_PARAMETER = r"([?&]([^=&\s]{1,128})=)[^&#\s]+"
# A password in an address, or a user's name that is long enough to be a token. A password may have
# any character: all up to the last `@` is hidden.
_URL_CREDENTIALS = r"(://)(?:[^/?#@\s:]*:\S*|[^/?#@\s]{16,})@"
# If no `@` follows, the pattern above would read to the end for each `://`.
_UP_TO_LAST_AT = r"(?<!\S)\S+@"
# `NAME=value`, `"NAME": "value"`; `--name value`.
_VALUE = r"""(?P<value>"[^"\n]{0,4096}"|'[^'\n]{0,4096}'|[^\s,;'"]+)"""
_ASSIGNED = rf"""(?P<name>[A-Za-z_][\w-]{{0,63}})(?P<sign>["']?\s*[=:]\s*){_VALUE}"""
_OPTION = rf"(?P<name>--[a-z][\w-]{{0,63}})(?P<sign>\s+){_VALUE}"
_BEARER = r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}"
# Token formats of well-known services, JSON web tokens, private keys, and webhook URLs.
_KNOWN_KEY = (
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|npm_|pypi-|dckr_pat_|whsec_"
    r"|nvapi-|xai-|ya29\.|SG\.|[rs]k_(?:live|test)_|gsk_|pplx-|dop_v1_|lin_api_|ntn_|ASIA|hvs\."
    r"|shp(?:at|ca|pa|ss)_|AGE-SECRET-KEY-|tskey-|figd_|csk-|secret_|HRKU-)[\w.-]{8,}"
    r"|\b\d{8,10}:[\w-]{35}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----"
    r"|(?<=://)[\w.-]{0,64}hooks?\.[\w.]+/\S+|(?<=://)[^\s/]{1,64}/[\w/]{0,64}hooks?/\S+"
)
_COMMON_WORDS = frozenset({"true", "false", "none", "null", "auto", "info", "debug", "warning"})
_MIN_CHARACTERS = 4  # of a value that is hidden everywhere: a shorter one is part of many words


def hide_credentials(value: Any) -> Any:
    """Hide passwords and tokens in URLs, such as those of policies, sources and environments."""
    return value if isinstance(value, dict) else _with_each(value, _without_credentials)


def _without_credentials(text: str) -> str:
    if "://" not in text:
        return text
    text = re.sub(
        _UP_TO_LAST_AT, lambda word: re.sub(_URL_CREDENTIALS, rf"\1{REDACTED}@", word[0]), text
    )
    return re.sub(
        _URL_PARAMETER,
        lambda found: found[1] + REDACTED if _names_secret(found[2]) else found[0],
        text,
    )


def _names_secret(name: str) -> bool:
    name = name.replace("-", "_")
    return bool(re.search(_HIDDEN_NAME, name)) and not re.search(_SHOWN_NAME, name)


def is_secret(name: str, value: str) -> bool:
    """Return whether to hide a variable's value, because of its name or its form."""
    if _names_secret(name) or hide_credentials(value) != value:
        return True
    if re.search(_KNOWN_KEY, value) or re.search(_BEARER, value):
        return True
    if any(_names_secret(part["name"]) for part in re.finditer(_ASSIGNED, value)):
        return True  # a connection string, or JSON
    return bool(re.match(_RANDOM, value)) and not re.search(_DIGEST_NAME, name)


def secret_values(payload: Mapping[str, Any]) -> list[str]:
    """Return a payload's token, and the values of its variables that look secret."""
    env = payload.get("env")
    found = [v for k, v in env.items() if is_secret(k, v)] if isinstance(env, dict) else []
    return [*found, payload["token"]] if payload.get("token") else found


def without_secrets(value: Any, payload: Mapping[str, Any]) -> Any:
    """Return a JSON value without credentials in URLs, and without the secrets in `payload`.

    It is for texts that may repeat secrets: the error of a request or of an environment, a spec.
    """
    return hide_values(hide_credentials(value), secret_values(payload))


def hide_values(value: Any, secrets: Collection[str]) -> Any:
    """Hide these secrets wherever they occur in a JSON value, but not short ones."""
    words = {s for s in secrets if (s.isdecimal() and len(s) < 6) or s.lower() in _COMMON_WORDS}
    long = {secret for secret in secrets if len(secret) >= _MIN_CHARACTERS}
    known = sorted(long - words, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, known)))
    return _with_each(value, lambda text: pattern.sub(REDACTED, text)) if known else value


def hide_secrets(text: str, secrets: Collection[str] = ()) -> str:
    """Hide known secrets in a text, and what looks like one, so that other people may read it."""
    hidden: str = hide_values(text, secrets)
    hidden = re.sub(_KNOWN_KEY, REDACTED, re.sub(_BEARER, rf"\1{REDACTED}", hidden))
    hidden = str(hide_credentials(hidden))
    return re.sub(_OPTION, _without_named, re.sub(_ASSIGNED, _without_named, hidden))


def _without_named(found: re.Match[str]) -> str:
    is_word = found["value"].lower() in _COMMON_WORDS
    if is_word or not _names_secret(found["name"].removeprefix("--").replace("-", "_")):
        return found[0]
    quote = found["value"][0] if found["value"][0] in "\"'" else ""
    return f"{found['name']}{found['sign']}{quote}{REDACTED}{quote}"


def _with_each(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to each string in a JSON value, except to the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_with_each(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _with_each(item, change) for key, item in value.items()}
    return value


def redact(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload with hidden tokens, and hidden values of variables that look secret."""
    shown = {name: hide_credentials(value) for name, value in payload.items()}
    if shown.get("token") is not None:
        shown["token"] = REDACTED
    if isinstance(env := shown.get("env"), dict):
        shown["env"] = {k: REDACTED if is_secret(k, v) else v for k, v in env.items()}
    if options := shown.get("engine_options"):
        shown["engine_options"] = [_option_shown(text) for text in options]
    return shown


def _option_shown(text: str) -> str:
    """Hide secret variables in an engine option whose value is JSON, such as a pod's patch."""
    name, equals, value = text.partition("=")
    try:
        found = json.loads(value)
    except ValueError:
        return text
    return (
        name + equals + json.dumps(_without_variables(found)) if isinstance(found, dict) else text
    )


def _without_variables(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_variables(item) for item in value]
    if not isinstance(value, dict):
        return value
    shown = {key: _without_variables(item) for key, item in value.items()}
    variable, text = shown.get("name"), shown.get("value")
    if isinstance(variable, str) and isinstance(text, str) and is_secret(variable, text):
        shown["value"] = REDACTED
    return shown
