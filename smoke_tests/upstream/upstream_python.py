# SPDX-License-Identifier: Apache-2.0
"""Runs programs that use upstream's client, each in a fork of one process that has imported it.

    run ──a line of JSON──▶ PYTHON, which has imported upstream's package ──fork──▶ the program
     ◀──its exit code──────────────────────┘                    its output: a file ◀─┘

The import takes four seconds of a processor, a fork milliseconds. One program runs at a time.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

_FORKING = """
import json, os, sys
from openenv import GenericEnvClient

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
    """A process that has imported upstream's client.

    Args:
        python: An interpreter that has upstream's package.
        folder: An empty folder.
    """

    def __init__(self, python: Path, folder: Path) -> None:
        self._output = folder / "output"
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [str(python), "-c", _FORKING],
            cwd=folder,
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,
        )

    def run(self, program: str, *arguments: str, folder: Path, environ: Mapping[str, str]) -> str:
        """Run a program, as `python -c PROGRAM ARGUMENTS...` would in this folder.

        Returns:
            What it printed. It must not have failed.
        """
        self._output.write_text("")
        asked: dict[str, object] = {
            "program": program,
            "arguments": arguments,
            "folder": str(folder),
        }
        asked |= {"environ": dict(environ), "output": str(self._output)}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        code, said = self._process.stdout.readline().strip(), self._output.read_text()
        assert code == "0", f"exit code {code}\n{said}"
        return said

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
