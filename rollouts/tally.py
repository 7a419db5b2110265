# SPDX-License-Identifier: Apache-2.0
"""What became of the episodes that were played, where `figures.py` tells how they went."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts, from the loop's thread alone."""

    written: int = 0  # also of those that a filter dropped, and that failed and were kept
    left_out: int = 0  # went well, but not all of their group
    filtered: Counter[str] = field(default_factory=Counter)  # by the filter that dropped them
    last_failures: dict[str, str] = field(default_factory=dict)  # by reason, in words

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "written": self.written,
            "left_out": self.left_out,
            "filtered": dict(self.filtered),
            "last_failures": self.last_failures,
        }
