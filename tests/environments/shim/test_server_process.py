# SPDX-License-Identifier: Apache-2.0
"""Starting a server: its output goes to the log, and a failed start has its reason."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

START = """
    import os, sys
    from openenvd.environments.shim.server_process import spawn

    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    place = {"cwd": None, "log_fd": log, "keep_fds": (), "cgroup": None, "oom_score_adj": None}
    try:
        pid = spawn(sys.argv[2:], dict(os.environ), **place)
    except OSError as exc:
        print(exc.errno, exc.filename)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("no child is left")
"""


def start(log: Path, *argv: str) -> list[str]:
    """Start a program in a process of its own; the lines that this printed."""
    command = [sys.executable, "-c", textwrap.dedent(START), os.fspath(log), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_both_outputs_of_a_server_are_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = start(log, "/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 3")
    assert said == ["3", "no child is left"]
    assert log.read_text() == "to stdout\nto stderr\n"


def test_a_server_that_cannot_be_started_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    absent = os.fspath(tmp_path / "absent")
    assert start(tmp_path / "log", absent) == [f"{errno.ENOENT} {absent}", "no child is left"]
