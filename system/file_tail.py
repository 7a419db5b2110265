# SPDX-License-Identifier: Apache-2.0
"""The last lines of a log file, read from its end. Light: a shim imports it."""

from __future__ import annotations

import os

MAX_TAIL_BYTES = 64 * 1024


def last_lines(
    path: str | os.PathLike[str], count: int, max_bytes: int = MAX_TAIL_BYTES
) -> list[str]:
    """At most `count` last lines, looking at no more than `max_bytes`; none of a missing file.

    A first line that was cut by `max_bytes` is left out, unless it is the only one.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - max_bytes)
            file.seek(start)
            data = file.read(max_bytes)
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    if start > 0 and len(lines) > 1:
        del lines[0]
    return lines[-count:] if count > 0 else []
