# SPDX-License-Identifier: Apache-2.0
"""What several commands share: `--json`, the connection, and values people write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..client import daemon
from ..server.settings import Paths
from .output import Output

if TYPE_CHECKING:
    from ..client.api import DaemonClient

Command = TypeVar("Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_MEGABYTES = {"k": 1 / 1024, "": 1.0, "m": 1.0, "g": 1024.0, "t": 1024.0**2}


def json_option(command: Command) -> Command:
    """`--json`, as the argument `as_json`."""
    option = click.option(
        "--json", "as_json", is_flag=True, help="JSON alone on stdout, text on stderr."
    )
    return option(command)


def connect(output: Output, settings: Mapping[str, Any] | None = None) -> DaemonClient:
    """The daemon; started, and told of, when it is not running."""

    def say(line: dict[str, Any]) -> None:
        output.note(f"started the daemon at {line['address']} (pid {line['pid']})")

    return daemon.connect(Paths.from_environment(), settings=settings, on_start=say)


def reconnect() -> DaemonClient | None:
    """The daemon when it is back, never a new one."""
    return daemon.find(Paths.from_environment())


def megabytes(text: str) -> int:
    """`512M`, `2G`, or plain megabytes.

    Raises:
        click.BadParameter: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 512M or 2G")
    count = float(match[1]) * _MEGABYTES[match[2].lower()]
    if count < 1:
        raise click.BadParameter(f"{text!r} is less than 1 MB")
    return int(count)


def count_or_auto(text: str) -> int:
    """A number from 1, or 0 for `auto`.

    Raises:
        click.BadParameter: it is neither.
    """
    if text.strip().lower() == "auto":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is neither a number from 1 nor `auto`")
    return int(text)
