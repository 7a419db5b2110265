# SPDX-License-Identifier: Apache-2.0
"""Serves a project's app as upstream does: by its own uvicorn, in one process.

    PYTHON serve_app.py FOLDER APP...      APP: `module:attribute`; the first that imports is served

Prints the port on standard output. Runs in the project's own virtual environment and its folder.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import uvicorn


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # stdout has the port alone, so the project's output goes to stderr
    folder = Path(sys.argv[1])
    # The path of a project's image, followed by the project's neighbours under their package names.
    sys.path[:0] = [str(folder)]
    sys.path += [str(folder.parent), str(folder.parent.parent)]
    app = first_that_imports(sys.argv[2:])
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(answer, b"%d\n" % listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def first_that_imports(candidates: list[str]) -> Any:
    """Return the app; if none imports, exit with all tracebacks, the first candidate's last."""
    failures = []
    for candidate in candidates:
        module, _, attribute = candidate.partition(":")
        before = set(sys.modules)
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception:
            failures.append(f"{candidate}:\n{traceback.format_exc()}")
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == module.partition(".")[0]:
                    del sys.modules[name]
    print(*reversed(failures), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
