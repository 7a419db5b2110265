# SPDX-License-Identifier: Apache-2.0
"""Handles what children send over their links, and the exits of children.

a link from each child: ready, sockets of sessions, connections to isolate, failures
SIGCHLD ──▶ how it exited (`exits.py`) ──▶ clients and shim are notified ──▶ a restart is due
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable

from ...schema.protocol import Serving
from ...system.process.descriptors import Message, receive_message
from ...system.process.proc import exit_sentence, kill
from ..ipc.scoreboard import MICROSECONDS, Field
from .children import Child
from .close_notices import refuse
from .context import STOPPING, SupervisorContext
from .exits import ChildExit, exit_of
from .isolated_sessions import Orphans

QUICK_START_SECONDS = 0.5  # of a shard; one that takes longer is not given back as the last

log = logging.getLogger("openenvd.env_host")


class ChildLinks:
    """Handles the messages and the exits of all children."""

    def __init__(
        self,
        context: SupervisorContext,
        *,
        accept: Callable[[], None],
        keep_one: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            context: The supervisor's parts.
            accept: Accepts connections; called while many clients are notified.
            keep_one: Keeps a shard in memory from now on, since its start takes long.
        """
        self._context = context
        self._accept = accept
        self._keep_one = keep_one
        self.orphans: Orphans | None = None  # None: other processes may become children of ours

    def add(self, new: Child | None) -> None:
        """Listen to a child that was started."""
        if new is not None:
            self._context.children.add(new)
            self._context.selector.register(
                new.link, selectors.EVENT_READ, lambda: self._on_link(new)
            )

    def reap(self) -> None:
        """Notify shim and clients of the children that have exited."""
        ended = []
        for child, status, peak_bytes in self._context.children.reap():
            if child.is_isolated:
                ended.append(child.started_at)
            self._receive_last(child)
            exited = exit_of(
                child,
                status,
                peak_bytes,
                sessions=self._sessions_of(child),
                limit_bytes=self._context.config.session_memory_bytes,
                kills=self._context.programs.kills,
            )
            self._on_exit(exited)
        if self.orphans is not None:
            self.orphans.look(self._context.state_pid, ended_since=min(ended, default=None))
        self._reap_state()

    def _on_link(self, child: Child) -> None:
        if child.link.fileno() < 0:  # reaped in this very iteration, by an earlier event
            return
        with contextlib.suppress(EOFError):
            self._receive_all(child)
            return
        # The child has closed its end; SIGCHLD reports its exit.
        self._context.selector.unregister(child.link)

    def _receive_all(self, child: Child) -> None:
        while (message := receive_message(child.link)) is not None:
            self._handle(child, message)

    def _receive_last(self, child: Child) -> None:
        with contextlib.suppress(EOFError):
            self._receive_all(child)
        with contextlib.suppress(KeyError, ValueError):
            self._context.selector.unregister(child.link)
        child.link.close()

    def _handle(self, child: Child, message: Message) -> None:
        head = message.head
        if "isolate" in head:
            self._isolate(message)
        elif "for" in head:
            self._context.isolated.forward(message)
        elif "ready" in head:
            child.is_ready = True
            if time.monotonic() - child.started_at > QUICK_START_SECONDS:
                self._keep_one()  # the next session is not to wait for that again
            self._report_ready()
        elif "sessions_fail" in head:
            self._context.reports.note_failure(head["sessions_fail"])
        elif "failed" in head:
            child.failure = message
        else:
            self._context.copies.update(child, message)
        if head.get("sessions") == 0:
            self._context.isolated.free_slot(child)

    def _isolate(self, message: Message) -> None:
        if self._context.is_stopping:
            for fd in message.fds:
                refuse(fd, STOPPING)
        else:
            self.add(self._context.isolated.begin(message))

    def _report_ready(self) -> None:
        if self._context.is_ready or not self._context.children.are_ready:
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
        row = self._context.scoreboard[child.index]
        if child.is_isolated:
            return max(int(child.holds_slot), row[Field.ENDED])
        if self._context.plan.isolates:  # its row counts sessions that have their own processes
            return 0
        return max(row[Field.SESSIONS], row[Field.ENDED])

    def _reap_state(self) -> None:
        facts = self._context.state.reap() if self._context.state is not None else None
        if facts is not None and not self._context.is_stopping:
            fields = {"pid": facts["pid"], "generation": facts["generation"]}
            how = f"{exit_sentence(facts['wait_status'])} after {facts['seconds']:.1f} s"
            text = "the process with the shared state (pid %d, epoch %d) %s; its sessions ended"
            log.warning(text, *fields.values(), how, extra=fields)
            self._context.reports.report(facts | {"sessions": self._context.reporter.sessions})

    def _on_exit(self, exited: ChildExit) -> None:
        child = exited.child
        self._context.programs.report_rest(child)
        self._clean_up(exited)
        self._context.reporter.unsettle()
        self._context.isolated.free_slot(child)
        if self._context.is_stopping:
            return
        self.add(self._context.isolated.begin_next())
        if exited.is_expected:
            return
        self._raise_if_never_ready(exited)
        self._context.reports.report(exited.facts)
        log.warning("%s %s", child, exited.how, extra=child.log_fields)
        if not child.is_isolated:
            seconds = exited.facts["seconds"]
            self._context.restarts.exited(child.index, seconds=seconds, now=time.monotonic())

    def _clean_up(self, exited: ChildExit) -> None:
        """Notify the clients of a child that has exited, free its row, remove its cgroup."""
        child = exited.child
        if exited.wait_status or child.socket_copies:
            text = f"The process of this session ({child.where}) {exited.how}"
            text = STOPPING if self._context.is_stopping else f"{text}; the session has ended."
            self._context.copies.notify_clients(child, text, self._accept)
        elif child.connection_fd is not None:  # its client came and went
            os.close(child.connection_fd)
        row = self._context.scoreboard[child.index]
        self._context.idleness.note_use(row[Field.HEARTBEAT] / MICROSECONDS)
        row.clear()
        if child.is_isolated:  # what its session has started ends with it
            kill(child.pid, group=True)
        else:
            row[Field.MAX_SESSIONS] = self._context.plan.share(child.index)
            self._context.distributor.shard_exited(child.index)
        if child.group is not None:
            child.group.kill()
            child.group.remove()

    def _raise_if_never_ready(self, exited: ChildExit) -> None:
        """Fail when a shard exits before any has served."""
        if self._context.is_ready or exited.child.is_isolated:
            return
        self._context.children.signal(signal.SIGKILL)
        if exited.wait_status == signal.SIGKILL:  # for memory? the shim finds out why we die of it
            os.kill(os.getpid(), signal.SIGKILL)
        raise exited.failure
