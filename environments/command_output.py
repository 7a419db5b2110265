# SPDX-License-Identifier: Apache-2.0
"""Runs a command to its end, and passes its output on line by line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..system.process.process_identity import ProcessIdentity
from ..system.process.tree import stop_tree

STOP_GRACE_SECONDS = 2.0


def run_command(
    argv: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str],
    on_line: Callable[[str], None],
    stdin: IO[bytes] | None = None,
) -> tuple[int, list[str]]:
    """Run a command; returns its exit code, and the lines of both its streams.

    It, and what it has started, end with a launch that is cancelled.

    Args:
        argv: The program and its arguments.
        folder: Where it runs.
        environ: Its environment variables.
        on_line: Called with each line as it comes.
        stdin: What it reads; None: nothing.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        try:
            assert process.stdout is not None
            for line in map(str.rstrip, process.stdout):
                on_line(line)
                lines.append(line)
            code = process.wait()
        except BaseException:
            if process.poll() is None:  # not collected, so that the pid is still its own
                identity = ProcessIdentity.of(process.pid)
                stop_tree(identity, grace_seconds=STOP_GRACE_SECONDS, session=False)
            raise
    return code, [line for line in lines if line]
