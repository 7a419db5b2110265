# SPDX-License-Identifier: Apache-2.0
"""The tables of `docs/comparison.md` say one thing in each cell, and where ours is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "comparison.md").read_text()
PEERS = ["docker", "SkyPilot", "ollama", "pm2", "Ray", "Prefect", "OpenEnv", "here"]


def rows() -> list[list[str]]:
    """Return the rows of all tables, heads and rulers left out."""
    lines = re.findall(r"^\| [^|]+ \|.*\|$", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_table_has_all_peers() -> None:
    heads = re.findall(r"^\| \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(heads) == PAGE.count("\n## ")
    for head in heads:
        assert [cell.strip() for cell in head.split("|")] == PEERS


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row[0]))
def test_a_row_has_a_word_for_each_peer_and_a_command_or_a_page_for_ours(row: list[str]) -> None:
    assert len(row) == 1 + len(PEERS)
    for cell in row[1:]:
        assert re.match(r"(yes|no|partly)\b|[?\u2013]$", cell), cell
    assert re.search(r"^no|`openenv \w+|\]\([\w/.#-]+\)", row[-1]), row[-1]
