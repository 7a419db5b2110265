# SPDX-License-Identifier: Apache-2.0
"""Starting a server: its output goes to the log, and a failed start has its reason."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from openenvd.environments.shim.connections import DEFAULT_GRACE_SECONDS, error_line, read_operation
from openenvd.environments.shim.files import missing_since
from openenvd.system.text.json_lines import decode_line

START = """
    import os, sys
    from openenvd.environments.shim.server_process import spawn

    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        pid = spawn({"argv": sys.argv[2:]}, dict(os.environ), log)
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


def test_outputs_of_a_server_are_in_its_log_and_a_failed_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said = start(log, "/bin/sh", "-c", "echo to stdout; echo to stderr >&2; exit 3")
    assert said == ["3", "no child is left"]
    assert log.read_text() == "to stdout\nto stderr\n"
    absent = os.fspath(tmp_path / "absent")
    assert start(tmp_path / "log", absent) == [f"{errno.ENOENT} {absent}", "no child is left"]


# Messages between a shim and its clients, and when a run directory counts as removed.


@pytest.mark.parametrize(
    ("line", "order"),
    [
        (b'{"op": "stop", "grace_seconds": 2}', ("stop", 2.0)),
        (b'{"op": "stop"}', ("stop", DEFAULT_GRACE_SECONDS)),
        (b'{"op": ["stop"]}', (["stop"], DEFAULT_GRACE_SECONDS)),
        (b"{}", (None, DEFAULT_GRACE_SECONDS)),
    ],
)
def test_an_operation_is_read_with_its_grace(line: bytes, order: tuple[object, float]) -> None:
    assert read_operation(line) == order


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"stop",
        b"\xff",
        b"[1]",
        b'{"op": ' * 9000,
        b'{"grace_seconds": []}',
        b'{"grace_seconds": ' + b"9" * 400 + b"}",
    ],
    ids=["empty", "no JSON", "no text", "no object", "too deep", "no number", "too large"],
)
def test_an_invalid_message_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_operation(line)


def test_an_error_is_an_event() -> None:
    assert decode_line(error_line("unknown op: 1")) == {
        "event": "error",
        "message": "unknown op: 1",
    }


def test_a_path_is_missing_since_the_first_look_when_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert missing_since(str(path), None, 1.0) == 1.0
    assert missing_since(str(path), 1.0, 2.0) == 1.0
    path.touch()
    assert missing_since(str(path), 1.0, 3.0) is None
    # A disk that fails for a moment must not be the end of a replica.
    file = tmp_path / "file"
    file.touch()
    assert missing_since(str(file / "below"), 1.0, 2.0) is None  # ENOTDIR stands for any other
