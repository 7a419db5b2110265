# SPDX-License-Identifier: Apache-2.0
"""Branches of a session by replay, at any OpenEnv server, and how to reach those of ours.

    Journal     the last reset and the steps since, each with a digest of its answer
    repeat      the same messages in another session; each answer must have the same digest

A server that copies sessions itself answers a `branch` with ids; each is attached at its
`branch_address`. After one of the errors `REPLAYED` a client repeats the journal instead.

A digest leaves out the fields that differ between equal sessions by nature: `LEFT_OUT`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Awaitable, Callable
from typing import Self

from ...env_host.errors import WSErrorCode
from .connection import Message

REPLAY = "replay"  # the tier of this module; the server's are `state`, `copy` and `fork`
REPLAYED = (WSErrorCode.UNKNOWN_TYPE, WSErrorCode.BRANCH_UNSUPPORTED)
MAX_JOURNAL_BYTES = 64 << 20  # of a journal; a longer session is not replayed
_ENTRY_BYTES = 150  # of the objects around a message
LEFT_OUT = ("episode_id", "session_id", "request_id", "timestamp")
_LEFT_OUT = re.compile(
    rb'"(?:%b)" ?: ?(?:"(?:[^"\\]|\\.)*"|[^,}\]]*)' % "|".join(LEFT_OUT).encode(), re.DOTALL
)


class BranchFailed(Exception):
    """A session cannot be replayed: `code` says why, `answer` is the one that differs, if any."""

    def __init__(self, code: str, message: str, answer: Message = b"") -> None:
        super().__init__(message)
        self.code = code
        self.answer = answer


class Journal:
    """A session's messages since its last reset, with digests of their answers.

    Attributes:
        has_reset: Whether it begins with a reset.
        entries: The messages and digests; empty if there are too many.
        size_bytes: Of the messages, with the objects around them.
    """

    def __init__(self) -> None:
        self.has_reset = False
        self.entries: list[tuple[str | bytes, int]] = []
        self.size_bytes = 0

    def add(self, kind: str, message: str | bytes, answer: Message) -> None:
        """Add a message and its answer; one that is neither a reset nor a step changes nothing."""
        if kind == "reset":
            self.has_reset, self.entries, self.size_bytes = True, [], 0
        elif kind != "step":
            return
        self.size_bytes += len(message) + _ENTRY_BYTES
        if self.size_bytes <= MAX_JOURNAL_BYTES:
            self.entries.append((message, digest(answer)))
        else:
            self.entries = []

    def copy(self) -> Self:
        """Return a journal that later messages of the session do not change."""
        made = copy.copy(self)
        made.entries = self.entries.copy()
        return made

    async def repeat(self, ask: Callable[[str | bytes], Awaitable[Message]]) -> Message | None:
        """Repeat the messages in another session, and return the last answer; None: there is none.

        Raises `BranchFailed`: an answer differs from the recorded one, or there are too many.
        """
        if self.size_bytes > MAX_JOURNAL_BYTES:
            limit = f"{MAX_JOURNAL_BYTES >> 20} MB"
            text = f"the actions since the reset exceed {limit}, and are not repeated"
            raise BranchFailed(WSErrorCode.BRANCH_UNSUPPORTED, text)
        answer = None
        for number, (message, expected) in enumerate(self.entries):
            answer = await ask(message)
            if digest(answer) != expected:
                which = f"step {number}" if number else "the reset"
                text = f"{which} was answered otherwise when it was repeated"
                raise BranchFailed(WSErrorCode.BRANCH_DIVERGED, text, answer)
        return answer


def digest(answer: Message) -> int:
    """Return a number that equal answers share, in this process."""
    if b'_id"' in answer or b'timestamp"' in answer:  # a tenth of the time of the pattern
        answer = _LEFT_OUT.sub(b"", answer)
    return hash(bytes(answer))


def branch_address(address: str, session_id: str) -> str:
    """Return the address at which a branch is attached."""
    return f"{address}{'&' if '?' in address else '?'}session_id={session_id}"
