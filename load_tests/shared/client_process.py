# SPDX-License-Identifier: Apache-2.0
"""A child process of a load test, which runs one module. Messages are lines of JSON."""

import json
import os
import subprocess
import sys
from typing import Any


class ClientProcess:
    """One child.

    Args:
        module: The module of `load_tests` that the child runs with the arguments.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self._command = [sys.executable, "-m", f"load_tests.{module}", *map(str, arguments)]
        pipe = subprocess.PIPE
        # Without a buffer, Python loses the rest of a line that does not fit into the pipe.
        environ = {**os.environ, "PYTHONUNBUFFERED": ""}
        self._process = subprocess.Popen(
            self._command, env=environ, stdin=pipe, stdout=pipe, text=True
        )

    def tell(self, message: object) -> None:
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """Return the next message; if the child has ended, end the program."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{' '.join(self._command)} ended early; what it said is above")
        return json.loads(line)

    def end(self) -> None:
        """Close its input, at which the child ends."""
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()
