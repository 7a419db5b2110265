# SPDX-License-Identifier: Apache-2.0
"""The page of commands, which the site is built with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.cli import exit_codes
from openenvd.cli.main import COMMANDS
from openenvd.schema.settings import SETTINGS

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "commands_page.py"


@pytest.fixture(scope="module")
def page() -> str:
    # In a process of its own: click remembers the help option of whoever asked first.
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_command_has_its_help(page: str) -> None:
    for name in COMMANDS:
        assert f"\n## openenv {name}\n\n```text\nUsage: openenv {name} " in page


def test_every_setting_is_documented(page: str) -> None:
    for setting in SETTINGS:
        row = f"| `{setting.flag}` | `{setting.variable}` | {setting.default or ''} "
        assert row in page or setting.default in (0, False)
        assert setting.help in page


def test_every_exit_code_is_documented(page: str) -> None:
    codes = {v for k, v in vars(exit_codes).items() if k.isupper() and isinstance(v, int)}
    assert all(f"\n| {code} | " in page for code in codes)
