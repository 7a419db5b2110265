# SPDX-License-Identifier: Apache-2.0
"""How an operation says that it cannot do what was asked.

    OperationError          `kind` and `hint` go with the request's error
    └── InvalidOperation    it can never work as asked (`kind` is `invalid`)

The worker reads `kind` and `hint` of whatever was raised, and knows none of these classes; errors
without them are bugs, and told with their traceback. `environments.errors` follows the same rule.
"""

from __future__ import annotations


class OperationError(Exception):
    """Base of what operations raise on purpose."""

    kind = "operation_error"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidOperation(OperationError):
    """It can never work as asked."""

    kind = "invalid"
