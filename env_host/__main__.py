# SPDX-License-Identifier: Apache-2.0
"""Start the env host by its file path: `python -P …/env_host/__main__.py`.

It runs in the environment's own Python, where `openenvd` is not installed. Putting the folder
above on `sys.path` would make `server` and `cli` there shadow the project's own packages of that
name, so only the one package is made known, by its location.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "openenvd"


def make_package_known() -> None:
    """Make `import openenvd` find the package that this file belongs to."""
    root = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location(
        PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package {PACKAGE} at {root}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if PACKAGE not in sys.modules:
        make_package_known()
    # Until it is known whose byte code may be written (`startup.py`) only we are imported.
    may_not_write, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    importlib.import_module(f"{PACKAGE}.env_host.main")
    sys.dont_write_bytecode = may_not_write
    sys.exit(importlib.import_module(f"{PACKAGE}.env_host.main").main())
