# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a measurement itself; a session that fails is a result, not an error.

BenchError ─┬─ InvalidPlan
            └─ GeneratorLost
"""

from __future__ import annotations


class BenchError(Exception):
    """Base of this room's errors: `hint` says what to do next, `kind` how the request ends."""

    kind: str = "operation_error"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidPlan(BenchError):
    """The environment cannot do what the plan asks."""

    kind = "invalid"


class GeneratorLost(BenchError):
    """A generator exited early: nothing was measured."""
