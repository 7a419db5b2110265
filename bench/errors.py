# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a measurement itself; a session that fails is a result, not an error."""

from __future__ import annotations


class BenchError(Exception):
    """Base of this room's errors: `hint` says what to do next, `kind` how the request ends."""

    kind: str = "invalid"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidPlan(BenchError):
    """The grid makes no sense, or the environment cannot do what it asks."""


class Unreachable(BenchError):
    """Nothing answers at the address."""

    kind = "operation_error"


class GeneratorLost(BenchError):
    """A generator exited early: nothing was measured."""

    kind = "operation_error"
