# SPDX-License-Identifier: Apache-2.0
"""What upstream's module of MCP environments is given instead of fastmcp and mcp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "openenv/core/env_server/mcp_environment.py"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from openenvd.env_host.environment import deferred_imports
deferred_imports.defer_mcp()
from openenv.core.env_server import mcp_environment
print("fastmcp" in sys.modules, mcp_environment.use())
print("fastmcp" in sys.modules)
"""


def run(folder: Path, body: str) -> list[str]:
    """What a program prints that uses a module of this body, beside a fastmcp of its own."""
    module = folder / MODULE
    module.parent.mkdir(parents=True)
    for package in (module.parent, module.parent.parent, module.parent.parent.parent):
        (package / "__init__.py").touch()
    module.write_text("from fastmcp import Client\n" + body)
    (folder / "fastmcp.py").write_text("class Client:\n    kind = 'real'\n")
    (folder / "mcp.py").touch()
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("use", ["Client().kind", "Client.kind", "isinstance(1, Client) or 'real'"])
def test_the_package_is_imported_when_it_is_used(tmp_path: Path, use: str) -> None:
    assert run(tmp_path, f"def use():\n    return {use}\n") == ["False", "real", "True"]


def test_it_is_imported_at_once_for_a_version_that_needs_it_at_once(tmp_path: Path) -> None:
    body = "class Own(Client):\n    pass\n\ndef use():\n    return Own().kind\n"
    assert run(tmp_path, body) == ["True", "real", "True"]
