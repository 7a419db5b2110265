# SPDX-License-Identifier: Apache-2.0
"""How far a request is, in one line: operations tell `done` and `total` with their progress."""

from __future__ import annotations

from typing import Any

WIDTH = 24


def bar(progress: dict[str, Any]) -> str:
    """`━━━━━╌╌╌╌╌ 50 % `, with a space after it; nothing where nobody said how much there is."""
    done, total = progress.get("done"), progress.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float) or total <= 0:
        return ""
    share = min(1.0, max(0.0, done / total))
    filled = round(WIDTH * share)
    return f"{'━' * filled}{'╌' * (WIDTH - filled)} {100 * share:.0f} % "
