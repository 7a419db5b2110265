# SPDX-License-Identifier: Apache-2.0
"""The pages pass the linter of their prose, `docs/prose.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LINTER = Path(__file__).resolve().parents[2] / "docs" / "prose.py"


def lint(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LINTER), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_pages_are_in_plain_words() -> None:
    done = lint()
    assert done.returncode == 0, done.stdout


def test_a_refused_word_is_found_but_not_in_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The server `mend` mends it. None waits.\n")
    assert lint(page).stdout.count("page.md: ") == 2
