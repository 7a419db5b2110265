# SPDX-License-Identifier: Apache-2.0
"""Restart back-off: how long to wait before something that keeps failing is tried again."""

from __future__ import annotations

_MOST_DOUBLINGS = 30  # any bound is reached before; keeps the power a small number


def backoff_seconds(failures: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait after so many failures in a row: `first`, doubled by each more."""
    if failures <= 0:
        return 0.0
    return float(min(first * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest))
