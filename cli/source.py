# SPDX-License-Identifier: Apache-2.0
"""What `launch SOURCE` means, and the environment's name by default.

The daemon does not share our working directory: a folder is sent as an absolute path,
`module:Class` with the folder it is to be found from. Whether a source can be served at all is
decided where it is prepared; here the kinds are only distinguished.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ..environments.names import suggest_name, why_not

MANIFEST = "openenv.yaml"
_GLANCE_CHARACTERS = 64 * 1024
_BUNDLED = Path(__file__).resolve().parent.parent / "envs"
_NAME_LINE = re.compile(r"""name:\s*(?:"([^"]*)"|'([^']*)'|([^#]*))""")


@dataclass(frozen=True, slots=True)
class Source:
    """A source as the daemon needs it."""

    text: str  # a bundled name, an absolute folder, `module:Class`, or what the daemon is to judge
    name: str  # a valid name made from it
    note: str | None = None  # said when two things could have been meant


def read_source(text: str, here: Path, bundled: frozenset[str] | None = None) -> Source:
    """Tell apart what `text` means, seen from the folder `here`.

    A path (`./x`, anything with `/`) is a folder. A bare name is the bundled environment of that
    name, or else the folder of that name.
    """
    bundled = bundled_names() if bundled is None else bundled
    if "://" in text or text.startswith("git+"):
        return Source(text, suggest_name(text.rpartition("/")[2].partition(":")[0]))
    if text in bundled:
        note = None
        if (here / text).is_dir():
            note = f"launching the bundled {text}; write ./{text} for the folder"
        return Source(text, suggest_name(text), note)
    if text in {".", ".."} or text.startswith("~") or "/" in text:
        folder = (here / Path(text).expanduser()).resolve()
        return Source(str(folder), folder_name(folder))
    if ":" in text:
        return Source(text, suggest_name(text.rpartition(":")[2].rpartition(".")[2].lower()))
    if (here / text).is_dir():
        folder = (here / text).resolve()
        return Source(str(folder), folder_name(folder), f"launching the folder {folder}")
    return Source(text, suggest_name(text))


def working_folder() -> Path:
    """Return the working folder; `/` when it was removed or its path is not UTF-8."""
    try:
        here = Path.cwd()
        str(here).encode()
    except (OSError, UnicodeEncodeError):  # it was removed, or is not UTF-8
        return Path("/")
    return here


def folder_name(folder: Path) -> str:
    """The name in a project's manifest; without one, the folder's."""
    # A glance, not a parser: the manifest is read properly by the launch.
    for line in _lines(folder / MANIFEST):
        if match := _NAME_LINE.match(line):
            named = next((group for group in match.groups() if group), "").strip()
            if named:
                return suggest_name(named)
    return suggest_name(folder.name)


def _lines(path: Path) -> list[str]:
    try:
        if path.is_file():  # a pipe could be read for ever
            with path.open(errors="replace") as file:
                return file.read(_GLANCE_CHARACTERS).splitlines()
    except OSError:
        pass
    return []


def check_name(name: str) -> str:
    """`name`, when it may be one.

    Raises:
        click.BadParameter: saying what a name may be.
    """
    if (reason := why_not(name)) is None:
        return name
    text = f"{reason}; {suggest_name(name)!r} could be one"
    raise click.BadParameter(text, param_hint="--name")


def read_variables(given: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """`-e KEY=VALUE`, and `-e KEY` with the value it has here.

    Raises:
        click.BadParameter: an empty key, or one that is not set here.
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
    """The variables in files of Docker's format: `KEY=VALUE`, `KEY`, or a comment in each line.

    As there, a value is all behind the `=`, quotes included, and a key alone has the value that it
    has here, or is left out. Later files win.

    Raises:
        click.BadParameter: A file cannot be read, or a line is none of these.
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


def bundled_names() -> frozenset[str]:
    """The environments that come with this package."""
    return frozenset(found.parent.name for found in _BUNDLED.glob(f"*/{MANIFEST}"))
