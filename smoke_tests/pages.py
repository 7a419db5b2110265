# SPDX-License-Identifier: Apache-2.0
"""The blocks of the documentation's pages, run as a reader would type them.

All `bash` and `python` blocks of a page run in their order, in one shell and one folder, unless one
of these lines before a block says otherwise:

    <!-- not run: REASON -->      no test has what the block needs
    <!-- run with: WHAT -->       the suite that has what the block needs runs it (`SUITES`)
    <!-- before: COMMAND -->      a command that the reader of this block has run already

A `python` block whose first line is `# file: NAME` is written to that file. Other consecutive
`python` blocks are the cells of one notebook: they share variables, and may use `await`. `pip`
installs nothing; the block uses what the test has installed. `tests/repository/test_docs.py` checks
that every block of every page is found here, and either runs or has a reason.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from .conftest import Machine

REPOSITORY = Path(__file__).resolve().parent.parent
RUN = ("bash", "python")
# The suites that run blocks with a need; blocks without one run in test_pages.py.
SUITES = {
    "a certificate": "replicas/test_gateway.py",
    "a collector": "test_traces.py",
    "datasets": "rollouts/test_datasets.py",
    "docker": "engines/test_docker.py",
    "ray": "engines/test_ray.py",
    "slurm": "engines/test_slurm.py",
    "upstream": "upstream/test_upstream.py",
}
_BLOCK = re.compile(
    r"^(?P<marks>(?: *<!-- (?:not run|run with|before): [^\n]+ -->\n)*)"
    r"(?P<indent> *)```(?P<language>\S*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"<!-- ([a-z ]+): (.+) -->")
_FILE = re.compile(r"# file: (\S+)\n")
_NOTEBOOK = Path(__file__).with_name("notebook.py")
# Stand-ins for the reader's own project, class and policy.
_OWN = Path(__file__).with_name("own.yaml")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: The word behind the fence.
        code: Its text, without the fence's indentation.
        not_run: Why it is not run; empty if it runs.
        needs: The need whose suite runs it; empty: `test_pages.py`.
        before: Commands that its reader has run already.
    """

    language: str
    code: str
    not_run: str
    needs: str
    before: tuple[str, ...]


def all_pages() -> list[Path]:
    folders = (REPOSITORY.glob("*.md"), REPOSITORY.glob("examples/*.md"))
    return sorted([*(page for each in folders for page in each), *REPOSITORY.glob("docs/**/*.md")])


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, of any language."""
    for found in _BLOCK.finditer(page.read_text()):
        marks: dict[str, list[str]] = {}
        for name, told in _MARK.findall(found["marks"]):
            marks.setdefault(name, []).append(told)
        yield Block(
            found["language"],
            textwrap.dedent(found["code"]),
            not_run=", ".join(marks.get("not run", [])),
            needs=", ".join(marks.get("run with", [])),
            before=tuple(marks.get("before", [])),
        )


def blocks_to_run(page: Path, needs: str) -> list[Block]:
    """Return the blocks of a page that one suite runs: those with this value of `needs`."""
    return [
        block
        for block in blocks(page)
        if block.language in RUN and not block.not_run and block.needs == needs
    ]


def pages_that_need(what: str) -> list[Path]:
    """Return the pages that have blocks with this need; empty: blocks without one."""
    return [page for page in all_pages() if blocks_to_run(page, what)]


def name_of(page: Path) -> str:
    return "-".join(page.relative_to(REPOSITORY).with_suffix("").parts)


def script_of(page: Path, needs: str = "") -> str:
    """Join the blocks of a page to one shell script."""
    parts = ["set -euxo pipefail", 'pip() { echo "there already: pip $*"; }']
    cells: list[str] = []
    for number, block in enumerate(blocks_to_run(page, needs)):
        is_cell = block.language == "python" and not _FILE.match(block.code)
        if cells and (block.before or not is_cell):
            parts.append(shlex.join(["python", str(_NOTEBOOK), *cells]))
            cells = []
        parts += block.before
        if block.language == "bash":
            parts.append(block.code)
            continue
        named = _FILE.match(block.code)
        name = named[1] if named else f"block-{number}.py"
        parts.append(f"cat > {name} <<'END'\n{block.code}END")
        cells += [name] if is_cell else []
    if cells:
        parts.append(shlex.join(["python", str(_NOTEBOOK), *cells]))
    return "\n".join(parts)


def make_folder(folder: Path) -> None:
    """Make a reader's folder, with the examples and everything named `my_…` on the pages."""
    folder.mkdir()
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    shutil.copy(REPOSITORY / "examples" / "counter_environment.py", folder)
    (folder / "my_env").mkdir()
    for name, text in yaml.safe_load(_OWN.read_text()).items():
        (folder / name).write_text(text)
    shutil.copy(folder / "my_module.py", folder / "my_env")


def run_blocks(
    machine: Machine, page: Path, needs: str = "", replaced: Mapping[str, str] | None = None
) -> str:
    """Run blocks of a page for this user, in a folder of their own; return their output.

    Args:
        machine: The user.
        page: The page.
        needs: Selects the blocks with this need.
        replaced: The test's value for a text on the page, such as an address or a token.
    """
    folder = machine.home.parent / name_of(page)
    make_folder(folder)
    script = script_of(page, needs)
    for shown, real in (replaced or {}).items():
        assert shown in script, f"{page.name} has no {shown} any more"
        script = script.replace(shown, real)
    path = f"{Path(machine.command).parent}:{Path(sys.executable).parent}:{machine.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env={**machine.environ, "PATH": path},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
