# SPDX-License-Identifier: Apache-2.0
"""What an environment may be called: the name becomes a folder, a label and part of an address."""

from __future__ import annotations

import re
from pathlib import PurePath

from .errors import InvalidName

MAX_NAME_LENGTH = 63  # one DNS label

# Docker's names, and Python's, which upstream's projects have.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_UNUSABLE = re.compile(r"[^A-Za-z0-9_.-]+")


def validate_name(name: str) -> str:
    """The name itself, when it can be one.

    Raises:
        InvalidName
    """
    if (reason := why_not(name)) is not None:
        raise InvalidName(reason, f"give it another one: --name {suggest_name(name)}")
    return name


def why_not(name: str) -> str | None:
    """Say what keeps the text from being a name, by its character; None when it is one."""
    if not name:
        return "an environment's name is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"the name {name[:20]}… has {len(name)} characters; {MAX_NAME_LENGTH} are allowed"
    found = _NAME.match(name)
    if found is not None and found[0] == name:
        return None
    character = name[len(found[0]) if found else 0]
    where = "begin with" if _UNUSABLE.match(character) is None else "have"
    return (
        f"{name!r} cannot be an environment's name: it may not {where} {character!r}; letters a-z "
        "and A-Z, digits, '_', '-' and '.' are allowed, the last two not as the first"
    )


def suggest_name(text: str) -> str:
    """The nearest thing to `text` that is a valid name; `env` when nothing is left."""
    name = _UNUSABLE.sub("-", text.strip()).rstrip("-_.").lstrip("-.")
    return name[:MAX_NAME_LENGTH] or "env"


def name_of_source(source: str) -> str:
    """Name an environment after its source: `echo`, `my_env`, `sample`."""
    _, colon, reference = source.rpartition(":")
    if colon and reference.replace(".", "_").isidentifier():
        return suggest_name(reference.rpartition(".")[2].lower())
    return suggest_name(PurePath(source).name)
