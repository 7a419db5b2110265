# SPDX-License-Identifier: Apache-2.0
"""Forwards upstream's commands to its package, or to `uvx` if that is not installed.

Upstream's `openenv` (0.10.0) installs a script of the same name and has no hook for other packages,
so its commands are forwarded, in this process and with all their arguments. The check whether they
exist imports nothing of upstream's, because importing its command line takes seconds. The script
belongs to the package that was installed last, and uninstalling either package removes it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from . import exit_codes

COMMANDS = (
    *("init", "import", "build", "validate", "push", "fork"),
    *("skills", "collect", "catalog", "discover", "harbor"),
)
_MODULE = "openenv.cli.__main__"


def is_installed() -> bool:
    """Return whether upstream's command line can be imported, without importing it."""
    spec = find_spec("openenv")  # a top-level name: found without being imported
    folders = (spec.submodule_search_locations or []) if spec else []
    return any((Path(folder) / "cli" / "__main__.py").is_file() for folder in folders)


def run(arguments: list[str]) -> int:
    """Forward a whole command line; returns its exit code."""
    if not is_installed():
        return _run_by_uv(arguments)
    sys.argv = ["openenv", *arguments]
    try:
        import_module(_MODULE).main()
    except SystemExit as exc:
        if isinstance(exc.code, str):  # as Python itself handles `sys.exit("words")`
            sys.stderr.write(exc.code + "\n")
            return exit_codes.FAILED
        return exc.code or exit_codes.OK
    return exit_codes.OK


def _run_by_uv(arguments: list[str]) -> int:
    """Run an upstream command by `uvx`, which installs the package on first use."""
    import subprocess  # imported only here, as `status` starts with this module

    from uv import find_uv_bin

    note = f"note: `openenv {arguments[0]}` is upstream's; uvx --from openenv openenv runs it\n"
    sys.stderr.write(note)
    sys.stderr.flush()
    command = [find_uv_bin(), "tool", "run", "--from", "openenv", "openenv", *arguments]
    return subprocess.run(command, check=False).returncode
