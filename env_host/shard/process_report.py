# SPDX-License-Identifier: Apache-2.0
"""Reports how a serving process is: to the supervisor, and to clients whose calls time out.

The supervisor reads on the scoreboard what changes all the time, and learns by its link whether
environments can be created.
"""

from __future__ import annotations

import asyncio
import time

from ...system.memory.cgroups import own_group
from ...system.process.descriptors import Message
from ...system.process.loop_lag import LagSnapshot
from ...system.text.units import MB
from ..ipc.fd_messages import MessageChannel
from ..ipc.scoreboard import MICROSECONDS, Field, Scoreboard, now_microseconds
from ..sessions.table import SessionTable

SHORT_SHARE = 0.8  # of the memory limit, from which on a step that timed out may have lacked memory


class ProcessReport:
    """The report of one process.

    Args:
        table: Its sessions.
        scoreboard: Where its counters are, and the exits of other processes.
        index: Its row there.
        link: To the supervisor.
        owns_cgroup: Whether its cgroup is the replica's own.
    """

    def __init__(
        self,
        table: SessionTable,
        scoreboard: Scoreboard,
        index: int,
        link: MessageChannel,
        *,
        owns_cgroup: bool,
    ) -> None:
        self._table = table
        self._scoreboard = scoreboard
        self._counters = scoreboard[index]
        self._link = link
        self._owns_cgroup = owns_cgroup
        self._failure: str | None = None

    def write_counts(self) -> None:
        """Write the counters that change all the time."""
        counters, table = self._counters, self._table
        counters[Field.HEARTBEAT] = now_microseconds()
        counters[Field.BUSY] = sum(session.busy for session in table)
        counters[Field.BEGUN] = table.counts.begun
        counters[Field.STEPS] = table.counts.steps
        counters[Field.STEP_TIMEOUTS] = table.counts.step_timeouts

    def write_lag(self, lag: LagSnapshot) -> None:
        """Write the loop's lag to the scoreboard."""
        counters = self._counters
        counters[Field.LAG_P50] = int(lag.p50_seconds * MICROSECONDS)
        counters[Field.LAG_P99] = int(lag.p99_seconds * MICROSECONDS)
        counters[Field.LAG_MAX] = int(lag.max_seconds * MICROSECONDS)

    def write_abandoned(self, count: int, since: float) -> None:
        """Write how many calls still run whose sessions have ended, and when the oldest began."""
        seconds = asyncio.get_running_loop().time() - since
        self._counters[Field.ABANDONED_SINCE] = now_microseconds() - int(seconds * MICROSECONDS)
        self._counters[Field.ABANDONED] = count

    def send_failure(self) -> None:
        """Send the supervisor whether environments can be created, when that has changed."""
        if (failure := self._table.failure) != self._failure:
            self._failure = failure
            self._link.send(Message({"sessions_fail": failure or None}))

    def memory_note(self, began: float) -> str:
        """Return what memory had to do with a call that has timed out, if it had."""
        since = time.time() - (asyncio.get_running_loop().time() - began)
        exits, *_ = self._scoreboard.read_news()
        killed = sum(one.get("programs", 0) for one in exits if one["at"] >= since)
        group = own_group(is_ours=not self._owns_cgroup)
        held, limit = (0, 0) if group is None else (group.held_bytes(), group.limit_bytes())
        return memory_sentences(killed, held or 0, limit or 0)


def memory_sentences(killed: int, held_bytes: int, limit_bytes: int) -> str:
    """Return sentences for the client of a call that has timed out; empty: memory was not short.

    `killed` programs of the environment were killed for memory during the call. All processes of
    the replica, or of the isolated session, hold `held_bytes`; they may `limit_bytes` (0: any).
    """
    text = ""
    if killed:
        victims = "A program" if killed == 1 else f"{killed} programs"
        verb = "was" if killed == 1 else "were"
        text = f" {victims} that the environment had started {verb} killed for memory meanwhile."
    if limit_bytes and held_bytes >= SHORT_SHARE * limit_bytes:
        text += (
            f" Memory was short: {held_bytes / MB:.0f} MB were held together with other processes "
            f"of the replica, of {limit_bytes / MB:.0f} MB."
        )
    return text
