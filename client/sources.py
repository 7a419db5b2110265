# SPDX-License-Identifier: Apache-2.0
"""Finds out what the source of a launch means, and the environment's default name.

The daemon does not share our working directory: a folder is sent as an absolute path,
`module:Class` with the folder from which it is imported. The preparation decides whether a source
can be served at all. This module distinguishes the kinds of sources, and refuses a source that
names nothing before a daemon is started for it.

The payload of a rollout has the environment variables that a policy at a chat endpoint needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..schema.spec import REPOSITORY_SCHEMES, name_of_source, suggest_name
from .errors import ApiRefused

MANIFEST = "openenv.yaml"
_BUNDLED = Path(__file__).resolve().parent.parent / "env_host" / "bundled"


@dataclass(frozen=True, slots=True)
class Source:
    """A source as the daemon needs it."""

    text: str  # a bundled name, an absolute folder, `module:Class`, or text that the daemon checks
    name: str  # a valid name made from it
    note: str | None = None  # a note for the user if the text is ambiguous


def read_source(text: str, here: Path) -> Source:
    """Resolve `text` in the folder `here`.

    A path (`./x`, anything with `/`) is a folder. A bare name is the bundled environment of that
    name, or else the folder of that name.

    Raises `ApiRefused`: it is empty, or relative to a working folder that cannot be named.
    """
    if not text.strip():
        message = "the source is empty"
        hint = "is a variable unset? Name a bundled environment, a folder, or module:Class"
        raise _refused(message, hint)
    if text.startswith(REPOSITORY_SCHEMES):
        return Source(text, name_of_source(text))
    if "://" in text:
        return Source(text, suggest_name(text.rpartition("/")[2].partition(":")[0]))
    if text in bundled_names():
        note = None
        if (here / text).is_dir():
            note = f"launching the bundled {text}; write ./{text} for the folder"
        return Source(text, suggest_name(text), note)
    if text in {".", ".."} or text.startswith("~") or "/" in text:
        try:
            folder = resolve_path(text, here).resolve()
        except RuntimeError:  # `~` of an unknown user
            return Source(text, suggest_name(text))
        return Source(str(folder), folder_name(folder))
    resolve_path(text, here)  # refuses the text if it is relative to a folder without a name
    if ":" in text:
        return Source(text, suggest_name(text.rpartition(":")[2].rpartition(".")[2].lower()))
    if os.path.isdir(here / text):  # noqa: PTH112  # False of a path that is too long
        folder = (here / text).resolve()
        return Source(str(folder), folder_name(folder), f"launching the folder {folder}")
    return Source(text, suggest_name(text))


def check_source(payload: Mapping[str, Any]) -> None:
    """Check a source as the daemon does, so that a wrong one starts no daemon.

    Raises `ApiRefused`.
    """
    from ..environments.sources import resolve
    from ..schema.errors import EnvironmentsError  # imported only if no daemon runs

    try:
        resolve.check_source(payload)
    except EnvironmentsError as exc:
        raise _refused(exc.message, exc.hint) from None


def _refused(message: str, hint: str | None) -> ApiRefused:
    details = {"kind": "invalid", "message": message, "hint": hint, "field": "source"}
    return ApiRefused(HTTPStatus.UNPROCESSABLE_ENTITY, details)


def working_folder() -> Path:
    """Return the working folder, or `/` if it cannot be named; then relative paths are refused."""
    return Path("/") if _folder_fault() else Path.cwd()


def _folder_fault() -> str | None:
    """Return why the working folder cannot be named, if it cannot."""
    try:
        str(Path.cwd()).encode()
    except OSError:
        return "the current folder was removed"
    except UnicodeEncodeError:
        return "the path of the current folder is not UTF-8"
    return None


def resolve_path(text: str | os.PathLike[str], here: Path | None = None) -> Path:
    """Return a path as an absolute one, relative to `here`, by default the working folder.

    Raises `ApiRefused`: it is relative, and the working folder cannot be named.
    """
    path = Path(text).expanduser()
    if not path.is_absolute() and (fault := _folder_fault()):
        raise _refused(f"{path}: {fault}", "go to another folder, or write the whole path")
    return (here or working_folder()) / path


def folder_name(folder: Path) -> str:
    """Return the name in a project's manifest, or else the folder's name."""
    if (folder / MANIFEST).is_file():  # a pipe might never end
        from ..environments.sources.manifest import read_manifest
        from ..schema.errors import ManifestError

        with suppress(ManifestError):
            return suggest_name(read_manifest(folder).name)
    return suggest_name(folder.name)


def bundled_names() -> frozenset[str]:
    """Return the names of the environments that come with this package."""
    return frozenset(found.parent.name for found in _BUNDLED.glob(f"*/{MANIFEST}"))


CHAT_PREFIX = "openai:"
CHAT_VARIABLES = ("OPENAI_API_KEY", "OPENAI_MODEL")


def rollout_payload(
    names: Sequence[str], out: str | os.PathLike[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the payload of a rollout; a policy at a chat endpoint gets its variables."""
    payload = {
        "name": names[0],
        **({"more_names": list(names[1:])} if names[1:] else {}),
        "out": str(resolve_path(out).resolve()),
        "cwd": str(working_folder()),
        **options,
    }
    if str(options.get("policy")).startswith(CHAT_PREFIX):
        chat = {name: os.environ[name] for name in CHAT_VARIABLES if name in os.environ}
        payload["env"] = chat | options.get("env", {})
    return payload
