# SPDX-License-Identifier: Apache-2.0
"""Runs programs that use upstream's client, each in a fork of one process that has imported it.

    start ──a line of JSON──▶ PYTHON, which has imported upstream's package ──fork──▶ the program
    communicate ◀──its exit code───────────────────┘                    its output: a file ◀─┘

The import takes four seconds of a processor, a fork milliseconds. One program runs at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

_FORKING = """
import json, os, sys
from openenv import GenericEnvClient

print("imported", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(asked["output"], os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.argv = ["-c", *asked["arguments"]]
    exec(compile(asked["program"], "<program>", "exec"), {"__name__": "__main__"})
    sys.exit()
"""


class UpstreamPython:
    """A process that has imported upstream's client; it is started with the first program.

    Args:
        python: An interpreter that has upstream's package.
        folder: An empty folder.
    """

    def __init__(self, python: Path, folder: Path) -> None:
        self._command = [str(python), "-c", _FORKING]
        self._folder = folder
        self._output = folder / "output"
        self._process: subprocess.Popen[str] | None = None
        self._is_busy = False

    def start(
        self, program: str, *arguments: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        """Start a program, as `python -c PROGRAM ARGUMENTS...` would in this folder."""
        if self._is_busy:  # the program of a failed test still runs
            self.stop()
        self._output.write_text("")
        asked = {
            "program": program,
            "arguments": arguments,
            "folder": str(folder),
            "environ": dict(environ),
            "output": str(self._output),
        }
        self._is_busy = True
        print(json.dumps(asked), file=self._started().stdin, flush=True)

    def communicate(self) -> str:
        """Wait for the program to end, which must succeed; returns its output."""
        process = self._started()
        assert process.stdout is not None
        code = process.stdout.readline().strip()
        self._is_busy = False
        said = self._output.read_text()
        assert code == "0", f"exit code {code}\n{said}"
        return said

    def run(self, program: str, *arguments: str, folder: Path, environ: Mapping[str, str]) -> str:
        self.start(program, *arguments, folder=folder, environ=environ)
        return self.communicate()

    def stop(self) -> None:
        process, self._process = self._process, None
        self._is_busy = False
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "imported\n"
        return self._process
