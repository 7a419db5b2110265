# SPDX-License-Identifier: Apache-2.0
"""`openenv check --report FILE`: what a bug report needs, in one file, without secrets.

    versions, what `check` found ─┐
    limits, plan, workers, status ├─▶ values of all variables, tokens ─▶ what looks like ─▶ FILE
    settings, the daemon's log ───┘   and credentials in URLs go         a secret goes

Known secrets are found by their values, wherever they stand: the daemon's token, those of
environments, and all variables of launches, from the run files and from requests. Others are found
by what they look like. Each part that cannot be had says why: a daemon that does not start is
what many reports are about.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..client.api import DaemonClient
from ..client.errors import ClientError
from ..server.settings import Paths, given_settings
from ..system.hidden_values import REDACTED, hide_secrets, hide_values, is_secret

Json = dict[str, Any]

LOG_LINES = 300
REQUESTS = 100
_PACKAGES = ("openenv", "pydantic", "uvicorn", "websockets", "sqlalchemy", "psutil", "uv", "click")
_HEAD = """\
A report of openenvd, written {at} by `openenv check --report`.
Values of variables, tokens and credentials are replaced by {redacted}.
Look through it before you send it.
"""


def write(file: Path, paths: Paths, client: DaemonClient | None, checked: Json) -> None:
    """Write the report, for its owner alone.

    Args:
        file: It is replaced if it is there.
        paths: The daemon's home.
        client: Its daemon; None: there is none that answers.
        checked: What `check` found, or why it found nothing.

    Raises:
        OSError: It cannot be written.
    """
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "check": lambda: checked,
        "settings": lambda: _settings(paths),
        "variables that are set": lambda: sorted(n for n in os.environ if _matters(n)),
    }
    if client is not None:
        parts |= {
            "info": client.info,
            "status": client.status,
            "requests": lambda: client.requests(limit=REQUESTS),
        }
    found = {name: _said(part) for name, part in parts.items()}
    secrets = {*_secrets_of(found), *_secrets_at(paths)}
    head = _HEAD.format(at=time.strftime("%Y-%m-%d %H:%M:%S %z"), redacted=REDACTED)
    texts = [head]
    for name, value in found.items():
        texts.append(f"== {name}\n\n{_json(value, secrets)}\n")
    texts.append(f"== the last {LOG_LINES} lines of the daemon's log\n\n{_log(paths)}")
    text = hide_secrets("\n".join(texts), {*secrets, *_escaped(secrets)})
    text = text.replace(str(Path.home()), "~")
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(opened, "w", encoding="utf-8") as out:
        out.write(text)


def _json(value: Any, secrets: Collection[str]) -> str:
    """Return a part as JSON; values are hidden before a quotation mark or a letter is escaped."""
    return json.dumps(hide_values(_without_variables(value), secrets), indent=2)


def _escaped(secrets: Iterable[str]) -> Iterator[str]:
    """Yield the forms that secrets have within JSON, which lines of the log may be."""
    for secret in secrets:
        yield json.dumps(secret)[1:-1]
        yield json.dumps(secret, ensure_ascii=False)[1:-1]


def _said(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except (ClientError, OSError, ValueError) as exc:
        return {"not available": str(exc)}


def _versions() -> Json:
    found = {name: _version(name) for name in _PACKAGES}
    return {
        "openenvd": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "packages": {name: version for name, version in found.items() if version},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _settings(paths: Paths) -> Json:
    given = given_settings(paths, {})
    return {name: {"value": str(one.value), "from": one.origin} for name, one in given.items()}


def _matters(name: str) -> bool:
    return name.startswith(("OPENENV", "UV_", "PIP_", "DOCKER_")) or name.lower().endswith("_proxy")


def _log(paths: Paths) -> str:
    try:
        with paths.daemon_log.open(errors="replace") as file:
            return "".join(deque(file, maxlen=LOG_LINES))
    except OSError as exc:
        return f"not available: {exc}\n"


def _secrets_at(paths: Paths) -> Iterator[str]:
    """Yield the secrets in the files of a home: tokens, and the variables of what runs."""
    for file in (paths.token, *paths.runs.glob("*/*.json")):
        try:
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if file == paths.token:
            yield text
            continue
        try:
            yield from _secrets_of(json.loads(text))
        except ValueError:
            continue
    yield from (value for name, value in os.environ.items() if is_secret(name, value))


def _secrets_of(value: Any) -> Iterator[str]:
    """Yield the values of variables, and of what is called like a secret, in a JSON value."""
    if isinstance(value, list):
        for item in value:
            yield from _secrets_of(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "env" and isinstance(item, dict):
            yield from (text for text in item.values() if _is_value(text))
        elif _is_value(item) and is_secret(key, ""):
            yield item
        else:
            yield from _secrets_of(item)


def _is_value(value: Any) -> bool:
    return isinstance(value, str) and value != REDACTED


def _without_variables(value: Any) -> Any:
    """Return a JSON value in which no variable has its value."""
    if isinstance(value, list):
        return [_without_variables(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _hidden(item) if key == "env" and isinstance(item, dict) else _without_variables(item)
        for key, item in value.items()
    }


def _hidden(names: Iterable[str]) -> Json:
    return dict.fromkeys(names, REDACTED)
