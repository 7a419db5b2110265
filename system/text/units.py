# SPDX-License-Identifier: Apache-2.0
"""Units of memory, counts in words, and suggestions for a misspelled name."""

from __future__ import annotations

from collections.abc import Iterable

MB = 2**20


def plural(count: int, noun: str, ending: str = "s") -> str:
    """`1 session`, `2,000 sessions`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{ending}"


def near_matches(name: str, known: Iterable[str], otherwise: str) -> tuple[list[str], str]:
    """Return known names similar to a wrong one, and a hint: these, or `otherwise` without any."""
    from difflib import get_close_matches  # when a name is wrong

    near = get_close_matches(name, list(known))
    return near, f"did you mean {' or '.join(near)}?" if near else otherwise
