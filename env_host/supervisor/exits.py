# SPDX-License-Identifier: Apache-2.0
"""Explains the exit of a child: in words, as facts for the shim, as a failure to start.

    wait status, memory cgroup ──▶ `exit_of` ──▶ `ChildExit` ──▶ `facts`    to the shim
                                                           └──▶ `failure`  before any child served

Field names of the facts are those of `system.process.diagnose.Evidence`, which this room cannot
import. What a child's clients are sent: `close_notices.py`; when it is restarted:
`system/process/backoff.py`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...system.process.proc import exit_sentence
from ..errors import ShardFailed
from .children import Child
from .memory import KillCount, cap_sentence, memory_clause, was_for_memory

if TYPE_CHECKING:
    from ..ipc.reports import Notifier
    from ..ipc.scoreboard import Scoreboard

KEPT = 8  # exits that `/capacity` shows


@dataclass(frozen=True, slots=True)
class ChildExit:
    """The exit of a child, and what the child was."""

    child: Child
    wait_status: int
    how: str  # for people: `was killed by SIGKILL`
    facts: dict[str, Any]  # for the shim: `shard_exit` in `protocol.py`

    @property
    def is_expected(self) -> bool:
        """Return whether it exited since its session is over, or since it was asked to."""
        return self.child.is_retired or (self.child.is_isolated and self.wait_status == 0)

    @property
    def failure(self) -> ShardFailed:
        """Return why the supervisor fails to start, when a child exited before any had served."""
        if (message := self.child.failure) is not None:
            return ShardFailed(message.head["failed"], message.head["log_tail"])
        return ShardFailed(f"{self.child} {self.how} before it could serve", [])


def exit_of(
    child: Child,
    wait_status: int,
    peak_bytes: int | None,
    *,
    sessions: int,
    limit_bytes: int | None,
    kills: KillCount,
) -> ChildExit:
    """Collect what is known of an exit, before the child's memory cgroup is removed.

    Its own cgroup, if there is one, knows better than `peak_bytes`, and than the server's `kills`.
    `limit_bytes` is the cap of isolated sessions.
    """
    how, out_of_memory = exit_sentence(wait_status), child.killed_for
    evidence = kills.evidence_of(wait_status)
    if child.kills is not None and child.group is not None:
        peak_bytes = child.group.peak_bytes() or peak_bytes
        own = child.kills.evidence_of(wait_status)
        if out_of_memory is None and limit_bytes and was_for_memory(own, wait_status):
            out_of_memory, evidence = cap_sentence(limit_bytes), own
    if out_of_memory is None and was_for_memory(evidence, wait_status):
        how = f"{how}, {memory_clause(kills.limit_bytes)}"
    facts = {
        "shard": child.index,
        "pid": child.pid,
        "generation": child.config.generation,
        "wait_status": wait_status,
        "sessions": sessions,
        "seconds": time.monotonic() - child.started_at,
        "peak_bytes": peak_bytes,
        "isolated": child.is_isolated,
        "out_of_memory": out_of_memory,
        "detector": None if child.killed_for is None else "watchdog",
        "limit_bytes": limit_bytes if child.is_isolated else None,
        "replaced_for": child.replaced_for,
        **evidence,
    }
    return ChildExit(child, wait_status, out_of_memory or child.replaced_for or how, facts)


class ExitReports:
    """Reports exits below the supervisor, and failures to create environments.

    To the shim, and in the answer of `/capacity`, by which the agents of engines learn of them.
    """

    def __init__(self, notifier: Notifier, scoreboard: Scoreboard) -> None:
        self._notifier = notifier
        self._scoreboard = scoreboard
        self._count = 0
        self._last: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._left: list[dict[str, Any]] = []
        self._show()

    def report(self, facts: dict[str, Any]) -> None:
        """Report one exit; also the earlier ones are still shown, as far as there is room."""
        self._count += 1
        facts = {**facts, "number": self._count, "at": time.time()}
        self._last.append(facts)
        self._notifier.report(shard_exit=facts)
        self._show()

    def note_left(self, left: list[dict[str, Any]]) -> None:
        """Show what sessions have left behind."""
        if left != self._left:
            self._left = left
            self._show()

    def note_failure(self, cause: str | None) -> None:
        """Report why an environment could not be created; None: one could."""
        self._notifier.sessions_fail(cause)
        self._show()

    def _show(self) -> None:
        self._scoreboard.write_news(list(self._last), self._left, self._notifier.failure)
