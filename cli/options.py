# SPDX-License-Identifier: Apache-2.0
"""Shared by several commands: options, the connection, and the formats of targets and sizes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ..client import daemon
from ..client.errors import NotFound
from ..schema.settings import Paths
from ..system.text.json_lines import Json
from . import completion
from .output.output import Output

if TYPE_CHECKING:
    from ..client.api import DaemonClient
    from ..system.text.options import Option

Command = TypeVar("Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)", re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_FILE_HELP = "Read variables from a file of KEY=VALUE lines. Format as Docker's. Repeatable."
_MEGABYTES = {"k": 1 / 1024, "": 1.0, "m": 1.0, "g": 1024.0, "t": 1024.0**2}


def json_option(command: Command) -> Command:
    """Give a command `--json`; its `output` depends on the flag."""
    option = click.option(
        "--json", "output", is_flag=True, is_eager=True,
        callback=lambda _context, _option, as_json: Output(as_json=as_json),
        help="JSON alone on stdout, text on stderr.",
    )  # fmt: skip
    return option(command)


def connect(output: Output, before_start: Callable[[], None] = lambda: None) -> DaemonClient:
    """Connect to the daemon; start it and print a note if it is not running."""

    def say(line: Json) -> None:
        if replaced := line.get("replaced"):
            output.note(f"{replaced}; another takes its place, and environments continue")
        output.note(f"started the daemon at {line['address']} (pid {line['pid']})")

    return daemon.connect(Paths.from_environment(), on_start=say, before_start=before_start)


def reconnect() -> DaemonClient | None:
    """Connect to the daemon when it is back; never start a new one."""
    return daemon.find(Paths.from_environment())


def megabytes(text: str) -> int:
    """Return the megabytes of `512M`, `2G` or a plain number; raises `click.BadParameter`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 512M or 2G")
    count = float(match[1]) * _MEGABYTES[match[2].lower()]
    if count < 1:
        raise click.BadParameter(f"{text!r} is less than 1 MB")
    return int(count)


def seconds(text: str) -> float:
    """Return the seconds of `90`, `60s`, `5m` or `2h`; raises `ValueError`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 90, 60s, 5m or 2h")
    return float(match[1]) * _SECONDS[match[2].lower()]


class _Plain(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    def fail(
        self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None
    ) -> NoReturn:
        """Fail with click's message, such as `'abc' is not a number`, without its "valid"."""
        super().fail(message.replace(" is not a valid ", " is not a "), param, ctx)


class WholeNumber(_Plain, click.IntRange):
    """The type of an option that is a whole number."""

    name = "whole number"


class Number(_Plain, click.FloatRange):
    """The type of an option that is a number."""

    name = "number"


class Duration(click.FloatRange):
    """The type of an option that is a duration: seconds, `5m` or `2h`."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds, which are within the range."""
        try:
            read = seconds(value) if isinstance(value, str) else value
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
        return float(super().convert(read, param, ctx))


def count_or_auto(text: str) -> int | None:
    """Return a positive number, or None for `auto`; raises `click.BadParameter`."""
    if text.strip().lower() == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is neither a number from 1 nor `auto`")
    return int(text)


def read_action(text: str | None) -> Json | None:
    """Parse the value of `--action`, a JSON object; raises `click.BadParameter`."""
    if text is None:
        return None
    try:
        action = json.loads(text)
    except ValueError as exc:
        raise click.BadParameter(f"that is not JSON: {exc}", param_hint="--action") from None
    if not isinstance(action, dict):
        raise click.BadParameter("an action is a JSON object: {…}", param_hint="--action")
    return action


def declared_options(
    declaration: type, only: Collection[str] | None = None, *, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command a Click option for all or some options that a dataclass declares."""
    from ..system.text.options import options_of

    def decorate(command: Command) -> Command:
        for item in reversed(options_of(declaration)):
            is_left_out = only is not None and item.name not in only
            if is_left_out or item.name in without or item.own_flag == "":
                continue
            if item.kind is dict:  # a file hides the values from other users
                flag = f"--{item.name}-file"
                files = click.option(flag, multiple=True, metavar="FILE", help=_FILE_HELP)
                command = files(command)
            command = _click_option(item)(command)
        return command

    return decorate


def given_options(
    declaration: type, values: Mapping[str, Any], only: Collection[str] | None = None
) -> Json:
    """Return the given options of the command line, among all or some declared ones."""
    from ..system.text.options import options_of

    given: Json = {}
    for item in options_of(declaration):
        if only is not None and item.name not in only:
            continue
        value = values.get(item.name)
        if item.kind is dict:
            from_files = read_env_files(values.get(f"{item.name}_file") or (), os.environ)
            value = {**from_files, **read_variables(value or (), os.environ)} or None
        elif item.kind is list:
            value = list(value or ()) or None
        elif item.kind is bool and value == item.default:
            continue
        if value is not None:
            given[item.name] = value
    return given


def _click_option(item: Option) -> Callable[[Command], Command]:
    word = word_of(item)
    flags = [item.own_flag or f"--{word}"]
    more: Json = {"default": None}
    if item.kind is bool:
        flags = [f"--{word}/--no-{word}"] if item.default is None else flags
        more["is_flag"] = True
    elif item.kind is dict:
        flags = [f"-{word[0]}", *flags]
        more = {"multiple": True, "metavar": "KEY[=VALUE]"}
    elif item.kind is list:
        more = {"multiple": True, "metavar": item.metavar}
    else:
        kind, metavar = type_of(item)
        more |= {"type": kind, "metavar": item.metavar or metavar}
        if item.name == "provider" and not item.choices:
            more["shell_complete"] = completion.providers
    return click.option(*flags, item.name, help=help_of(item), **more)


def word_of(item: Option) -> str:
    """Return an option's name on the command line: its field's name without the unit."""
    return item.name.removesuffix("_seconds").removesuffix("_mb").replace("_", "-")


def help_of(item: Option) -> str:
    """Return the help of an option, with a default that is a number or a word."""
    if not item.default or item.kind not in (int, float, str):
        return item.help
    unit = "M" if item.name.endswith("_mb") else ""
    default = f"{item.default:g}" if item.kind is float else item.default
    return f"{item.help.rstrip('.')} [{default}{unit}]."


def type_of(item: Option) -> tuple[Any, str | None]:
    """Return Click's type of an option, and the placeholder of its value on the help page."""
    if item.auto:
        return count_or_auto, "N|auto"
    if item.choices:
        return click.Choice(item.choices), None
    if item.name.endswith("_mb"):
        return megabytes, "SIZE"
    if item.kind is float:
        least = item.least if item.above is None else item.above
        is_time = item.name.endswith("_seconds")
        kind = Duration if is_time else Number
        return kind(min=least, min_open=item.above is not None), "DURATION" if is_time else "X"
    if item.kind is int:
        least, most = (None if x is None else int(x) for x in (item.least, item.most))
        return WholeNumber(least, most), "N"
    return str, None


def read_variables(given: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Read `-e KEY=VALUE`, and `-e KEY` with its value in this process.

    Raises `click.BadParameter`: a key is empty, or has no value in this process.
    """
    variables = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or (not equals and key not in environ):
            reason = "has no name before the `=`" if not key else f"{key} is not set here"
            raise click.BadParameter(f"{text!r}: {reason}; write KEY=VALUE", param_hint="-e")
        variables[key] = value if equals else environ[key]
    return variables


def read_env_files(paths: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Read variables from files of Docker's format: lines of `KEY=VALUE`, `KEY`, or comments.

    As with Docker, a value is everything after the `=`, including quotes, and a key alone has its
    value in this process, or is left out. Later files win.

    Raises `click.BadParameter`: a file cannot be read, or a line is none of these.
    """
    variables: dict[str, str] = {}
    for path in paths:
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as exc:
            raise click.BadParameter(f"{path}: {exc}", param_hint="--env-file") from None
        for number, line in enumerate(text.split("\n"), 1):
            line = line.lstrip().removesuffix("\r")
            if not line or line.startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not key or any(character.isspace() for character in key):
                reason = "no name before the `=`" if not key else f"a space in the name {key!r}"
                raise click.BadParameter(f"{path}:{number}: {reason}", param_hint="--env-file")
            if equals or key in environ:
                variables[key] = value if equals else environ[key]
    return variables


def find_target(client: DaemonClient, text: str) -> tuple[Json | None, Json | None]:
    """Look up `NAME|REQUEST_ID` as an environment, and otherwise as a request.

    Raises:
        NotFound: The error has near matches.
        ApiRefused: It is the beginning of several ids.
    """
    try:
        return client.environment(text), None
    except NotFound as exc:
        unknown = exc
    with contextlib.suppress(NotFound):
        return None, client.request(text)
    near = unknown.details.get("near") or []
    hint = f"did you mean {' or '.join(near)}?" if near else "openenv status lists both"
    message = f"no environment and no request is called {text!r}"
    raise NotFound(unknown.status, {**unknown.details, "message": message, "hint": hint}) from None
