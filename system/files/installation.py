# SPDX-License-Identifier: Apache-2.0
"""The installation that this process runs from, and whether one is still as it was.

A process goes on when its files are removed or replaced (`uv cache clean`, `pip install -U`, a
deleted virtual environment), but cannot import or start anything more from them.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[2]
_FILE = "__init__.py"  # written anew by every installation


def mark() -> dict[str, str | list[int]]:
    """Return the folder of this installation, and what tells it from a later one there."""
    return {"folder": str(_PACKAGE), "file": _identify(_PACKAGE)}


def is_as_it_was(marked: object) -> bool:
    """Return whether the installation of a `mark` is still there; False for any other value."""
    if not isinstance(marked, dict) or not isinstance(folder := marked.get("folder"), str):
        return False
    try:
        return _identify(Path(folder)) == marked.get("file")
    except OSError:
        return False


def _identify(folder: Path) -> list[int]:
    found = (folder / _FILE).stat()
    return [found.st_ino, found.st_mtime_ns]
