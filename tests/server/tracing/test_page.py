# SPDX-License-Identifier: Apache-2.0
"""`docs/tracing.md` lists every attribute that the code sets, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "server/dispatch/request_traces.py",
    "rollouts/traced_episodes.py",
    "server/tracing.py",
)
NAMESPACES = "error|http|messaging|network|openenvd|process|server|service|url|user_agent"
SET = re.compile(rf'"((?:{NAMESPACES})(?:\.[a-z_]+)+)"')
QUERIED = re.compile(r"(?:span|resource)\.([a-z_]+(?:\.[a-z_]+)+) [!=]")
ROWS = re.compile(r"^\| (`[a-z_.`, ]+`) \|", re.MULTILINE)
LISTED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)`")
OF_CALLS = re.compile(r"^\| (`[a-z_.`, ]+`) \| call \|", re.MULTILINE)  # FastAPI sets them


def listed(page: str) -> set[str]:
    return {name for row in ROWS.findall(page) for name in LISTED.findall(row)}


def test_the_page_lists_the_attributes_of_the_code() -> None:
    code = "".join((ROOT / source).read_text() for source in SOURCES)
    page = (ROOT / "docs" / "tracing.md").read_text()
    assert {*SET.findall(code)} == listed(page) - {*LISTED.findall(OF_CALLS.findall(page)[0])}


def test_the_queries_of_the_page_ask_for_attributes_that_it_lists() -> None:
    page = (ROOT / "docs" / "tracing.md").read_text()
    queried = set(QUERIED.findall(page))
    assert queried >= {"openenvd.exit.kind"}
    assert queried <= listed(page)
