# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a measurement itself; a session that fails is a result, not an error.

BenchError          `hint` says what to do next; `kind` how the request ends
├── InvalidPlan     the grid makes no sense, or the environment cannot do what it asks
├── Unreachable     nothing answers at the address
└── GeneratorLost   one of our own processes ended early
"""

from __future__ import annotations


class BenchError(Exception):
    """Base of everything this room raises."""

    kind: str = "invalid"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidPlan(BenchError):
    """The requested measurement is not possible."""


class Unreachable(BenchError):
    """There is no server to measure."""

    kind = "operation_error"


class GeneratorLost(BenchError):
    """A generator exited early: nothing was measured."""

    kind = "operation_error"
