# SPDX-License-Identifier: Apache-2.0
"""Writes byte code for what is imported from some folders, and for nothing else.

A project's dependencies are thousands of files, of which it imports a fifth: each is compiled when
it is first imported. So is our own package, for a Python that is not the one it was installed for:
100 files, a sixth of what a start costs. The project's own folder is left as it is
(`PYTHONDONTWRITEBYTECODE`, which programs that the environment starts inherit).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from typing import Any


def write_below(*folders: str) -> None:
    """Write the byte code of imported modules whose files lie below one of the folders."""
    write = SourceFileLoader.set_data  # which imports call for byte code alone
    prefixes = tuple(folder + os.sep for folder in folders)

    def set_data(self: SourceFileLoader, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefixes):
            write(self, path, data, **options)

    SourceFileLoader.set_data = set_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = False
