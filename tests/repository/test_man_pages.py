# SPDX-License-Identifier: Apache-2.0
"""The manual pages: as the commands are, readable by `man`, and in the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .man_pages import pages

MACROS = frozenset({"TH", "SH", "PP", "TP", "B", "BR"})


def test_the_manual_pages_match_the_commands() -> None:
    # In a process of its own: click remembers the help option of whoever asked first.
    script = Path(__file__).with_name("man_pages.py")
    done = subprocess.run([sys.executable, str(script), "--check"], check=False)
    assert done.returncode == 0, "write them again: python tests/repository/commands_page.py"


def test_only_known_macros_are_used() -> None:
    text = "\n".join(pages().values())
    assert set(re.findall(r"^\.(\S+)", text, re.MULTILINE)) <= MACROS
    assert not re.search(r"^'", text, re.MULTILINE)


def test_groff_reads_them_without_a_warning() -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here")
    for text in pages().values():
        done = subprocess.run(
            ["groff", "-Kutf8", "-man", "-Tutf8", "-ww"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
