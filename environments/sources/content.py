# SPDX-License-Identifier: Apache-2.0
"""The files that a source is served from."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .resolve import ClassSource

COPY_IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "node_modules")


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a project's files by their relative paths, but for version control and caches."""
    for parent, folders, names in os.walk(folder):
        skipped = COPY_IGNORED(parent, [*folders, *names])
        folders[:] = [each for each in folders if each not in skipped]
        for name in names:
            path = Path(parent, name)
            if name not in skipped and (path.is_symlink() or path.is_file()):
                yield str(path.relative_to(folder)), path


def module_files(source: ClassSource) -> Iterator[tuple[str, Path]]:
    """Yield the files of the module or package that has the class; none when it is not there."""
    top = source.reference.partition(":")[0].partition(".")[0]
    module, package = source.folder / f"{top}.py", source.folder / top
    if module.is_file():
        yield module.name, module
    elif package.is_dir():
        for relative, path in files_below(package):
            yield f"{top}/{relative}", path


def hash_of(path: Path) -> bytes:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
