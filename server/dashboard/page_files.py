# SPDX-License-Identifier: Apache-2.0
"""`Page`: the files of the page, read and compressed when one is first asked for, and kept.

The page names them below a folder that is the hash of them all, `/dashboard/HASH/app.js`: a browser
keeps these, and asks for the page alone, which carries its own hash.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from ..api.security import PAGE_FILES

INDEX = "index.html"
_FILES = files(__package__) / "static"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page, compressed."""

    content: bytes
    tag: str
    media_type: str | None


@dataclass(frozen=True, slots=True)
class PageFiles:
    """All files of the page by their names, 40 kB: nothing else is opened, whatever a path says."""

    version: str  # changes with any of them
    files: Mapping[str, PageFile]


class Page:
    """The files of the page."""

    def __init__(self) -> None:
        self._files: PageFiles | None = None
        self._reading = asyncio.Lock()

    async def files(self) -> PageFiles:
        """All of them; a thread, and so a free one, is needed the first time alone."""
        async with self._reading:
            if self._files is None:
                self._files = await asyncio.to_thread(_read)
            return self._files


def _read() -> PageFiles:
    contents = dict(_contents(_FILES, ""))
    version = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:16]
    html = contents[INDEX].replace(PAGE_FILES.encode(), f"{PAGE_FILES}{version}/".encode())
    contents[INDEX] = html
    return PageFiles(version, {name: _compress(name, each) for name, each in contents.items()})


def _contents(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _contents(entry, f"{name}/")
        else:
            yield name, entry.read_bytes()


def _compress(name: str, content: bytes) -> PageFile:
    tag = f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'  # weak: of both encodings
    return PageFile(gzip.compress(content, mtime=0), tag, mimetypes.guess_type(name)[0])
