# SPDX-License-Identifier: Apache-2.0
"""What is run in a forked child ends as a program of its own does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, threading, time
from openenvd.system.process.forking import run_and_exit


def main():
    atexit.register(print, "exited")
    threading.Thread(target=lambda: print(time.sleep(0.2) or "thread")).start()
    print("main")
    return 7


if __name__ == "__main__":
    run_and_exit("__main__:main")
"""


def test_it_waits_for_threads_calls_what_is_registered_and_exits_with_the_returned_code(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (7, ["main", "thread", "exited"]), done.stderr
