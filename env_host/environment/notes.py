# SPDX-License-Identifier: Apache-2.0
"""`Notes`: what earlier launches of a project have found out, kept in its virtual environment.

    concurrency     what calling its factory once has shown

They are forgotten when any of the project's Python files has changed, and are not those of a launch
with other environment variables, by which a factory may choose what it makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CONCURRENCY = "concurrency"
_NOT_ITS_OWN = ("__pycache__", "node_modules", "venv")


class Notes:
    """The notes about one project.

    Args:
        venv: The virtual environment that was made for it; None: nothing is kept.
        folders: The project's folders, of whose Python files the notes are true.
    """

    def __init__(self, venv: str | None, folders: Sequence[str]) -> None:
        self._path: Path | None = None
        self._values: dict[str, Any] = {}
        if venv is None:
            return
        known = "\0".join((*_files(folders), *_variables()))
        digest = hashlib.sha256(known.encode(errors="surrogateescape")).hexdigest()
        self._path = Path(venv, "notes", f"{digest[:20]}.json")
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._values = dict(json.loads(self._path.read_bytes()))

    def get(self, name: str) -> Any:
        """Return what is noted; None when nothing is."""
        return self._values.get(name)

    def keep(self, name: str, value: Any) -> None:
        """Note a value for later launches; a disk that cannot be written is no fault."""
        self._values[name] = value
        if self._path is None:
            return
        written = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            written.write_text(json.dumps(self._values))
            written.replace(self._path)


def _files(folders: Sequence[str]) -> Iterator[str]:
    """Yield path, size and time of each Python file of the project."""
    for folder in folders:
        for parent, names, files in os.walk(folder):
            names[:] = sorted(n for n in names if n[0] != "." and n not in _NOT_ITS_OWN)
            for path in (Path(parent, name) for name in sorted(files) if name.endswith(".py")):
                with contextlib.suppress(OSError):
                    yield f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"


def _variables() -> Iterator[str]:
    """Yield what the launch was given, and the few that it inherits; not those of each start."""
    for name, value in sorted(os.environ.items()):
        if not name.startswith("OPENENVD_"):
            yield f"{name}={value}"
