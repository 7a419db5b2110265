# SPDX-License-Identifier: Apache-2.0
"""Room for many sockets, made before the first of them is opened.

The kernel's table of a process's descriptors doubles when it is full: at 64, 256, 512. Where
threads share it, each time whoever opens a file then waits until no processor can be looking at the
old table, 10 to 20 ms. Once is enough, on a thread that nobody waits for in a hurry.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from pathlib import Path

SPARE = 64  # besides the sockets: files, pipes, whatever a policy opens


def make_room(sockets: int) -> None:
    """For that many more descriptors; blocks. As far as the limit goes, and no error beyond."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError), Path(os.devnull).open() as file:
        wanted = file.fileno() + sockets + SPARE
        if limit != resource.RLIM_INFINITY:
            wanted = min(wanted, limit - 1)
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, wanted))
