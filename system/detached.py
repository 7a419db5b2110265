# SPDX-License-Identifier: Apache-2.0
"""Starts a program that outlives this process, and is no child that it would have to reap."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# The shell starts the program in the background and is gone: the starter may be a short-lived
# worker, or have threads.
_DETACH = '"$@" &'


def spawn_detached(
    argv: Sequence[str], environ: Mapping[str, str], *, pass_fds: Iterable[int], log_path: Path
) -> None:
    """Start `argv` in a session of its own, its output appended to `log_path`.

    Raises:
        OSError: it cannot be started (`BlockingIOError`: there is no room for another process).
            That it ends at once is not seen here.
    """
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, argv[0], *argv],
            env=dict(environ),
            pass_fds=tuple(pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            check=True,
        )
    except subprocess.CalledProcessError as exc:
        # All that a shell can fail in here: whether the program starts is not its concern.
        why = f"the shell could not fork (exit code {exc.returncode})"
        raise BlockingIOError(errno.EAGAIN, why, argv[0]) from exc
    finally:
        os.close(log_fd)
