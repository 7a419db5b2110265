# SPDX-License-Identifier: Apache-2.0
"""Units of memory, and counts for people."""

MB = 2**20


def plural(count: int, noun: str) -> str:
    """`1 session`, `2 sessions`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
