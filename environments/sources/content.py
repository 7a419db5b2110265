# SPDX-License-Identifier: Apache-2.0
"""The files that a source is served from, and a digest that tells their versions apart.

A rollback runs what ran before, or nothing: the digest of a launch is in its result, and the launch
that repeats it compares.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from ...system.units import MB
from .resolve import ClassSource, Project, ResolvedSource

COPY_IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "node_modules")
# What tools and running environments leave behind.
_NOT_SERVED = ("*.pyc", "*.log", "*.db", "*.db-wal", "*.db-shm", "*.sqlite*", "*.egg-info/*")
_READ_BYTES = 8 * MB  # a larger file, a model's weights, is told by its size and its time


def content_of(source: ResolvedSource) -> str | None:
    """Return the digest of the files of a project or class; None: it has none of its own."""
    if isinstance(source, Project):
        files = dict(files_below(source.folder))
    elif isinstance(source, ClassSource):
        files = dict(module_files(source))
    else:
        return None
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        if not _is_left_behind(name):
            digest.update(f"{name}\0".encode("utf-8", "surrogateescape"))
            digest.update(_content_of_file(path))
    return digest.hexdigest() if files else None


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


def _is_left_behind(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in name.split("/")[:-1])
    return is_hidden or any(fnmatch(name, pattern) for pattern in _NOT_SERVED)


def _content_of_file(path: Path) -> bytes:
    if path.is_symlink():
        return os.fsencode(path.readlink())
    try:
        status = path.stat()
        if status.st_size > _READ_BYTES:
            return f"{status.st_size} {status.st_mtime_ns}".encode()
        return hash_of(path)
    except OSError:  # removed just now, or not ours to read
        return b"-"
