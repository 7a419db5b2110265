# SPDX-License-Identifier: Apache-2.0
"""The repository stays as small, and as plainly worded, as it has been made.

A change that exceeds a bound makes something else smaller. Whoever takes away lowers the bound.
"""

import csv
import re
from pathlib import Path

import pytest

from .house import ROOT, copy_files, files, measure

# The most that there may be.
BOUNDS = {
    "shipped lines": 72_943,
    "code lines": 47_111,
    "modules": 379,
    "test lines": 68_189,
    "words of pages": 24_995,
    "words of decisions": 7_977,
    "folders at the root": 15,
    "large classes": 2,
    "crowded folders": 0,
    "dialect words": 7,
    "private names": 0,
}


@pytest.mark.parametrize("what", BOUNDS)
def test_a_bound_is_kept(what: str) -> None:
    assert measure()[what] <= BOUNDS[what], f"{what}: see tests/repository/house.py"


def test_every_figure_has_a_bound() -> None:
    assert BOUNDS.keys() == measure().keys()


def test_outside_of_a_checkout_the_same_files_count_and_none_that_git_ignores(
    tmp_path: Path,
) -> None:
    copy_files(tmp_path)
    (tmp_path / "build" / "lib").mkdir(parents=True)
    (tmp_path / "build" / "lib" / "left.py").write_text("left = 1\n")
    assert files(tmp_path) == files()
    assert measure(tmp_path) == measure()


def test_the_fact_of_each_removed_test_is_checked_by_a_test_that_there_is_or_has_a_row() -> None:
    removed, *rows = csv.reader((ROOT / "tests" / "removed_tests.csv").read_text().splitlines())
    assert {len(row) for row in rows} == {len(removed)}
    code = "".join(path.read_text() for path in ROOT.glob("*tests/**/*.py"))
    known = set(re.findall(r"def (test_\w+)", code))
    known |= {name for row in rows for name in re.findall(r"::(test_\w+)", row[0])}
    named = {name for row in rows for name in re.findall(r"::(test_\w+)\b(?!…)", row[1])}
    assert named - known == set()
