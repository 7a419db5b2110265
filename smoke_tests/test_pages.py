# SPDX-License-Identifier: Apache-2.0
"""Every page's blocks, and the examples of every command's help, as a reader would type them.

How blocks are read and run is in `pages.py`; what needs an engine runs in that engine's suite.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Machine, new_machine
from .pages import name_of, pages_that_need, run_blocks

pytestmark = pytest.mark.timeout(420)  # a page is a dozen commands

README = REPOSITORY / "README.md"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with new_machine(tmp_path_factory.mktemp("pages") / "home") as machine:
        yield machine


@pytest.fixture
def reader(shared: Machine) -> Iterator[Machine]:
    """The same user, with a daemon and no environment."""
    yield shared
    shared.ok("down", "--all")


def test_the_blocks_of_the_readme_run(reader: Machine) -> None:
    run_blocks(reader, README)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page", [p for p in pages_that_need("") if p != README], ids=name_of)
def test_the_blocks_of_a_page_run(reader: Machine, page: Path) -> None:
    run_blocks(reader, page)
