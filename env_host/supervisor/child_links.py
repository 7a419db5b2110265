# SPDX-License-Identifier: Apache-2.0
"""Handles what children send over their links, and the exits of children.

a link from each shard: ready, sockets of sessions, session processes, failures
SIGCHLD ──▶ how it exited (`exit_of`) ──▶ clients and shim are notified ──▶ a restart is due
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...schema.protocol import ENVIRONMENT_HEADER, Serving
from ...system.process.descriptors import Message, receive_message
from ...system.process.diagnose import explain_child
from ...system.process.proc import exit_sentence, has_exited
from ..errors import ShardFailed
from ..ipc.scoreboard import MICROSECONDS, Field
from ..startup import STOPPING
from .children import Child, exit_of
from .context import SupervisorContext
from .session_processes import Orphans

QUICK_START_SECONDS = 0.5  # a shard that takes longer to start is kept when it is the last one

log = logging.getLogger("openenvd.env_host")


@dataclass(eq=False, slots=True)
class ChildLinks:
    """Handles the messages and the exits of all children."""

    _context: SupervisorContext
    _accept: Callable[[], None]  # accepts connections; called while many clients are notified
    _keep_one: Callable[[], None]  # keeps one shard from now on, since its start takes long
    orphans: Orphans | None = None  # None: this process does not adopt orphans
    _ended_since: float | None = None  # when the oldest began whose orphans were not looked for

    def add(self, new: Child) -> None:
        """Listen to a shard that was started."""
        assert new.link is not None
        self._context.children.add(new)
        self._context.selector.register(new.link, selectors.EVENT_READ, lambda: self._on_link(new))

    def reap(self) -> None:
        """Notify shim and clients of the children that have exited."""
        for child, status, peak_bytes in self._context.children.reap():
            if child.link is None:
                self._ended_since = min(child.started_at, self._ended_since or child.started_at)
            else:
                with contextlib.suppress(EOFError):
                    self._receive_all(child)
                with contextlib.suppress(KeyError, ValueError):
                    self._context.selector.unregister(child.link)
                child.link.close()
            sessions, kills = self._sessions_of(child), self._context.programs.kills
            how, facts = exit_of(child, status, peak_bytes, sessions=sessions, kills=kills)
            self._on_exit(child, how, facts)
        self._look_for_orphans()
        gone = self._context.state.reap() if self._context.state is not None else None
        if gone is not None and not self._context.is_stopping:
            fields = {"pid": gone["pid"], "generation": gone["generation"]}
            how = f"{exit_sentence(gone['wait_status'])} after {gone['seconds']:.1f} s"
            text = "the process with the shared state (pid %d, epoch %d) %s; its sessions ended"
            log.warning(text, *fields.values(), how, extra=fields)
            sessions = self._context.reporter.sessions
            gone |= {"sessions": sessions, "reason": explain_child(gone).to_json()}
            self._context.reporter.report_exit(gone)

    def _look_for_orphans(self) -> None:
        """Look for programs that sessions have left, unless the pids of some copies are unknown."""
        if self.orphans is not None and not self._context.processes.is_forking:
            since, self._ended_since = self._ended_since, None
            self.orphans.look(self._context.state_pid, ended_since=since)

    def _on_link(self, child: Child) -> None:
        link = child.link
        if link is None or link.fileno() < 0:  # reaped in this very iteration, by an earlier event
            return
        with contextlib.suppress(EOFError):
            self._receive_all(child)
            return
        # The child has closed its end; SIGCHLD reports its exit.
        self._context.selector.unregister(link)

    def _receive_all(self, child: Child) -> None:
        assert child.link is not None
        while (message := receive_message(child.link)) is not None:
            self._handle(child, message)

    def _handle(self, child: Child, message: Message) -> None:
        head = message.head
        if self._context.processes.take(child, message):
            if any(map(has_exited, head.get("copied", ()))):  # before it was known
                self.reap()
            elif "copied" in head and self._ended_since is not None:
                self._look_for_orphans()
            return
        if "ready" in head:
            child.is_ready = True
            if time.monotonic() - child.started_at > QUICK_START_SECONDS:
                self._keep_one()  # so that the next session need not wait as long
            self._report_ready()
        elif "sessions_fail" in head:
            self._context.reporter.note_failure(head["sessions_fail"])
        elif "failed" in head:
            child.failure = head
        else:
            self._context.copies.update(child, message)

    def _report_ready(self) -> None:
        shards = self._context.children.shards
        if self._context.is_ready or not all(each.is_ready for each in shards):
            return
        self._context.is_ready = True
        self._context.programs.record_known()
        self._context.idleness.note_use(time.monotonic())
        self._context.notifier.ready(
            max_sessions=self._context.plan.max_sessions,
            serving=Serving.SESSIONS,
            shards=self._context.plan.shards,
            isolate=self._context.plan.isolates,
        )

    def _sessions_of(self, child: Child) -> int:
        """Return how many sessions a child that has exited had, with a WebSocket or without."""
        if child.is_isolated:
            return int(child.holds_slot)
        row = self._context.scoreboard[child.index]
        return max(row[Field.SESSIONS], row[Field.ENDED])

    def _on_exit(self, child: Child, how: str, facts: dict[str, Any]) -> None:
        context, wait_status = self._context, facts["wait_status"]
        context.programs.report_rest(child)
        text = self._words_for_clients(child, how)
        if child.is_isolated:
            context.processes.ended(child, text)
        else:
            self._clean_up(child, text, wait_status)
            context.reporter.report_at_once()
        if context.is_stopping:
            return
        if child.is_retired or (child.is_isolated and wait_status == 0):  # as it was asked to
            return
        if not (context.is_ready or child.is_isolated):  # a shard, and none has served yet
            context.children.kill()
            if wait_status == signal.SIGKILL:  # perhaps for memory: the shim finds out, if we die
                os.kill(os.getpid(), signal.SIGKILL)
            failed = f"{child} {how} before it could serve"
            failure = child.failure or {"failed": failed, "log_tail": []}
            raise ShardFailed(failure["failed"], failure["log_tail"])
        context.reporter.report_exit(facts)
        log.warning("%s %s", child, how, extra=child.log_fields)
        if not child.is_isolated:
            context.restarts.exited(child.index, seconds=facts["seconds"], now=time.monotonic())

    def _words_for_clients(self, child: Child, how: str) -> str:
        if self._context.is_stopping:
            return STOPPING
        name = self._context.config.headers.get(ENVIRONMENT_HEADER, self._context.config.name)
        text = f"The process of this session ({child.where}) {how}"
        return f"{text}; the session has ended. openenv status {name} says more."

    def _clean_up(self, shard: Child, text: str, wait_status: int) -> None:
        """Notify the clients of a shard that has exited, and free its row."""
        if wait_status or shard.socket_copies:
            self._context.copies.notify_clients(shard, text, self._accept)
        row = self._context.scoreboard[shard.index]
        self._context.idleness.note_use(row[Field.HEARTBEAT] / MICROSECONDS)
        row.clear()
        row[Field.MAX_SESSIONS] = self._context.plan.share(shard.index)
        self._context.processes.shard_exited(shard)
        self._context.distributor.shard_exited(shard.index)
