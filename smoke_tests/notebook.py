# SPDX-License-Identifier: Apache-2.0
"""Run files like a notebook's cells: one after another, with shared variables and one event loop.

python notebook.py FILE...      in the folder from which they import
"""

import ast
import asyncio
import inspect
import sys
from pathlib import Path

sys.path[0] = ""
names: dict[str, object] = {"__name__": "__main__"}
with asyncio.Runner() as runner:
    for file in sys.argv[1:]:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        done = eval(compile(Path(file).read_text(), file, "exec", flags=flags), names)
        if inspect.iscoroutine(done):
            runner.run(done)
