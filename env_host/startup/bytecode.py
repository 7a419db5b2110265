# SPDX-License-Identifier: Apache-2.0
"""Writes byte code for what is imported from one folder, and for nothing else.

A project's dependencies are thousands of files, of which it imports a fifth: each is compiled when
it is first imported. The project's own folder is left as it is (`PYTHONDONTWRITEBYTECODE`, which
programs that the environment starts inherit).
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from typing import Any


def write_below(folder: str) -> None:
    """Write the byte code of imported modules whose files lie below the folder."""
    write = SourceFileLoader.set_data  # which imports call for byte code alone
    prefix = folder + os.sep

    def set_data(self: SourceFileLoader, path: str, data: Any, **options: Any) -> None:
        if path.startswith(prefix):
            write(self, path, data, **options)

    SourceFileLoader.set_data = set_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = False
