# SPDX-License-Identifier: Apache-2.0
"""Each line of `docs/guarantees.md` names tests that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.endswith("| shown by |")
]
NAMED = re.compile(r"`((?:smoke_)?tests/[\w/]+\.py)::(test_\w+)`")


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(function.name for function in functions)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_a_guarantee_names_tests_that_there_are(row: str) -> None:
    named = NAMED.findall(row.rsplit("|", 2)[1])
    assert named
    for file, test in named:
        assert test in _tests_of(file), f"{file} has no {test}"
