# SPDX-License-Identifier: Apache-2.0
"""Variables for environments and policies: `-e KEY=VALUE`, `-e KEY`, `--env-file FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click


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
