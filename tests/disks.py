# SPDX-License-Identifier: Apache-2.0
"""Small disks of real file systems in memory, and what fills them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system with these options; the test is skipped where none can be mounted."""
    if os.geteuid() != 0 or not sys.platform.startswith("linux"):
        pytest.skip("a small tmpfs is mounted by root on Linux")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Write a file that takes all room."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    return ballast


def use_up_files(folder: Path) -> list[Path]:
    """Make empty files until the disk has room for no more."""
    made: list[Path] = []
    with suppress(OSError):
        while True:
            path = folder / f"file-{len(made)}"
            path.touch()
            made.append(path)
    return made
