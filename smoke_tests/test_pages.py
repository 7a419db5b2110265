# SPDX-License-Identifier: Apache-2.0
"""The quick start and the how-to pages, block by block, as a reader would type them.

Every `bash` block of a page runs, in its order, in one shell and one folder; a `python` block runs,
or is written where its first line says so (`# file: NAME`). A block after a line `<!-- not run:
REASON -->` needs what is not here (an engine, a project, minutes): of it, and of all pages,
`tests/repository/test_docs.py` holds that each command line is one that the parser takes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import OPENENV, REPOSITORY, Machine, new_machine

pytestmark = pytest.mark.timeout(300)  # a page is a dozen commands

DOCS = REPOSITORY / "docs"
PAGES = [DOCS / "quickstart.md", *sorted((DOCS / "how-to").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?P<not_run> *<!-- not run: .+ -->\n)?"
    r"(?P<indent> *)```(?P<language>bash|python)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_FILE = re.compile(r"# file: (\S+)\n")


def script_of(page: Path) -> str:
    """Put the blocks of a page together as one shell script."""
    parts = ["set -euxo pipefail"]
    for block in _BLOCK.finditer(page.read_text()):
        if block["not_run"]:
            continue
        code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        if block["language"] == "bash":
            parts.append(code)
            continue
        named = _FILE.match(code)
        parts.append(f"cat > {named[1] if named else 'block.py'} <<'END'\n{code}END")
        if named is None:
            parts.append("python block.py")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One user who reads all pages, in a folder with the example's class."""
    folder = tmp_path_factory.mktemp("pages")
    with new_machine(folder / "home") as machine:
        machine.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        shutil.copy(REPOSITORY / "examples" / "counter_environment.py", folder)
        yield machine


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(shared: Machine, page: Path) -> None:
    assert Path(OPENENV).exists()
    done = subprocess.run(
        ["bash", "-c", script_of(page)],
        env=shared.environ,
        cwd=shared.home.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_pages_with_blocks() -> None:
    assert len(PAGES) >= 10
    assert all("openenv" in script_of(page) or page.stem == "ci" for page in PAGES)
