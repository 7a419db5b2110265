# SPDX-License-Identifier: Apache-2.0
"""Whether a file is locked (`flock`), as by a process that holds the lock for as long as it lives.

The try is itself a short hold: shared, so that two that ask at once do not take each other for the
holder. It must not get into the way of one that takes the lock without waiting.
"""

from __future__ import annotations

import fcntl
import os


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether another process holds the lock of a file; not where there is no file.

    Raises:
        OSError: the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
