# SPDX-License-Identifier: Apache-2.0
"""Writes to the terminals of this user, as `write` of util-linux does: `mesg n` refuses it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"(ttys)?\d+")


def write_to_terminals(text: str, folders: Sequence[str] = ("/dev/pts", "/dev")) -> None:
    """Write a text to each terminal of this user that takes messages; never blocks.

    Linux has them in `/dev/pts`, macOS as `/dev/ttys001`.
    """
    data = text.replace("\n", "\r\n").encode()
    found = (path for folder in folders for path in Path(folder).iterdir())
    for path in (each for each in found if _NAME.fullmatch(each.name)):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or not status.st_mode & stat.S_IWGRP:
                continue
            terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                os.write(terminal, data)
            finally:
                os.close(terminal)
