# SPDX-License-Identifier: Apache-2.0
"""Forms of sessions."""

from __future__ import annotations

from .habit import ON_PURPOSE, habit


class Habits:
    @habit(resets=False, steps=("look", "look"), ours=ON_PURPOSE + "reset first")
    def steps_first(self, how):
        """A session that steps before any reset."""
