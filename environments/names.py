# SPDX-License-Identifier: Apache-2.0
"""What an environment may be called: the name becomes a folder, a label and part of an address."""

from __future__ import annotations

import re
from pathlib import PurePath

from .errors import InvalidName

MAX_NAME_LENGTH = 63  # one DNS label

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_UNUSABLE = re.compile(r"[^a-z0-9_.-]+")


def validate_name(name: str) -> str:
    """The name itself, when it can be one.

    Raises:
        InvalidName
    """
    if not name:
        raise InvalidName("an environment's name is empty", "give it one: --name trial")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidName(
            f"the name {name[:20]}… has {len(name)} characters; {MAX_NAME_LENGTH} are allowed",
            "give it a shorter one: --name trial",
        )
    if _NAME.fullmatch(name) is None:
        raise InvalidName(
            f"{name!r} cannot be an environment's name: small letters, digits, '-', '_' and '.', "
            "with a letter or digit first",
            f"give it another one: --name {suggest_name(name)}",
        )
    return name


def suggest_name(text: str) -> str:
    """The nearest thing to `text` that is a valid name; `env` when nothing is left."""
    name = _UNUSABLE.sub("-", text.strip().lower()).strip("-_.")
    return name[:MAX_NAME_LENGTH] or "env"


def name_of_source(source: str) -> str:
    """Name an environment after its source: `echo`, `my_env`, `sample`."""
    _, colon, reference = source.rpartition(":")
    if colon and reference.replace(".", "_").isidentifier():
        return suggest_name(reference.rpartition(".")[2])
    return suggest_name(PurePath(source).name)
