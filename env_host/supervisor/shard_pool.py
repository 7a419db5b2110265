# SPDX-License-Identifier: Apache-2.0
"""Starts, stops and replaces shards (`shard_policies.py`), and passes connections on to them.

`ChildLinks` handles what children send over their links, and the exits of children.

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
from ...system.process.prctl import adopt_orphans
from ...system.process.proc import has_exited
from ...system.text.units import plural
from ..errors import ShardFailed
from ..ipc.reports import abandoned_seconds, blocked_seconds
from ..ipc.scoreboard import MICROSECONDS, Field, Scoreboard, now_microseconds
from ..shared_state.process import StateProcess
from ..startup import STOPPING, stacks_signal
from . import shard_policies
from .children import Child, exit_of
from .context import SupervisorContext
from .memory import MemoryWatchdog
from .session_processes import Orphans
from .shard_policies import Replacement, ShardDemand, replacement_of

RETRY_SECONDS = 0.01  # until a report that a shard could not read is sent again
CORDON_SECONDS = 0.2  # for connections that are on their way to a shard that will be stopped
QUICK_START_SECONDS = 0.5  # a shard that takes longer to start is kept when it is the last one

log = logging.getLogger("openenvd.env_host")


class ShardPool:
    """Starts and stops shards, and the process with the state that sessions share, if any."""

    def __init__(
        self,
        context: SupervisorContext,
        shared_class: type | None,
        *,
        accept: Callable[[], None],
    ) -> None:
        self._context = context
        self._shared_class = shared_class  # whose sessions share a state; None: they share none
        plan = context.plan
        keeps_one = plan.keeps_one or shared_class is not None
        self._demand = ShardDemand(plan.shards, least=int(keeps_one))
        session_limit, limit = context.config.session_memory_bytes, context.programs.watched_bytes
        self._memory = MemoryWatchdog(context.children, session_limit, limit)
        self.links = ChildLinks(context, accept, lambda: self._demand.keep_one())
        self._replaces_at = 0.0  # when shards to replace are next looked for; monotonic
        self._stacks_signal = stacks_signal()

    def due(self, now: float) -> list[float | None]:
        """Return when `update` has something to do, on the monotonic clock."""
        context, reports_at = self._context, self._context.reporter.due()
        moments = [
            context.restarts.next_due(),
            context.backlog.due(),
            self._memory.due(is_used=context.reporter.sessions > 0),
            now + RETRY_SECONDS if context.processes.has_unsent else None,
        ]
        if context.is_placing:
            moments += [
                context.distributor.due(),
                reports_at,
                self._demand.due(),
                *(each.retire_at for each in context.children.shards),
                context.programs.kills.due(is_used=context.reporter.sessions > 0),
                None if reports_at is None else self._replaces_at,
                None if context.state is None else context.state.restarts.next_due(),
            ]
        return moments

    def start(self) -> None:
        """Start the first shards, after the state process if sessions share a state."""
        context = self._context
        context.spawner.prepare()
        if context.plan.isolates and context.spawner.can_fork:
            adopt_orphans()
            self.links.orphans = Orphans(context.children)
        context.programs.start()
        if not context.spawner.can_fork:
            self._demand = ShardDemand(context.plan.shards, least=context.plan.shards)
        if self._shared_class is not None:
            start = None if context.spawner.can_fork else context.spawner.start_program
            fds = context.spawner.imported_fds
            context.state = StateProcess(self._shared_class, fds, start)
            context.state.start()
            context.spawner.state_address = context.state.address
        for index in range(self._demand.wanted):
            self._start_shard(index)

    def update(self) -> None:
        """Do what is due: starts, stops, connections to pass on, reports."""
        context = self._context
        if not context.is_stopping:
            for index in context.restarts.take_due(time.monotonic()):
                self._start_shard(index)
            if context.state is not None:
                context.state.start_if_due()
        self._place()
        context.processes.send()
        if context.is_ready:
            context.reporter.report(lambda: context.programs.find_left(context.state_pid))
        self._memory.check()
        if context.is_placing:
            context.programs.report_killed()
        self._replace_blocked()

    def stop(self) -> None:
        """Ask all shards to exit; none is started any more."""
        context = self._context
        context.restarts.cancel()
        for row in context.scoreboard:
            row[Field.STOPPING] = 1
        context.children.terminate_shards()

    def assign_quota(self, max_sessions: int) -> None:
        """Limit the number of sessions; sessions beyond a lower limit continue."""
        context = self._context
        context.spawner.plan = context.plan.with_sessions(max_sessions, context.max_fds)
        context.share_sessions()
        context.reporter.report_at_once()

    def _place(self) -> None:
        """Start or stop shards until there are as many as needed; pass connections on to them."""
        now = time.monotonic()
        self._context.backlog.close_refused(now)
        if not self._context.is_placing:
            return
        self._context.distributor.update(now)
        rows = self._context.scoreboard
        if self._context.distributor.load:
            self._demand.keep_one()  # what is in memory after a session or request is kept
        self._start_and_stop_shards(self._demand.update(self._load(rows, now), now))
        self._context.distributor.place(self._demand.wanted, now)
        self._context.copies.reserve(len(self._context.backlog.waiting))

    def _load(self, rows: Scoreboard, now: float) -> int:
        """Return for how many shards there is work; one more if none has room."""
        load = self._context.distributor.load + sum(row.load + row[Field.WAITING] for row in rows)
        if (hung := self._context.distributor.count_hung(now)) > 0:
            load = max(load, 1 + hung)
        serving = [row for row in rows if row.is_serving and not row[Field.CORDONED]]
        is_full = bool(serving) and not any(row.room for row in serving)
        return max(load, len(serving) + 1) if is_full else load

    def _start_and_stop_shards(self, wanted: int) -> None:
        now, backlog = time.monotonic(), self._context.backlog
        has_passed_on = self._context.distributor.has_passed_on
        # A crowd could fill the kernel's queue during a fork, so forks wait until it has arrived.
        is_crowd_arriving, backlog.is_crowd_arriving = backlog.is_crowd_arriving, False
        for row in self._context.scoreboard:
            child = self._context.children.at(row.index)
            is_surplus = row.index >= wanted
            if child is None:
                row[Field.CORDONED] = int(is_surplus)
                is_scheduled = row.index in self._context.restarts.scheduled
                if not (is_surplus or is_scheduled or is_crowd_arriving):
                    self._start_shard(row.index)
            elif child.is_retired:
                child.retire_if_due(now)
            elif not is_surplus or not child.is_ready or has_passed_on(row):
                row[Field.CORDONED], child.retire_at = 0, None
            elif child.retire_at is None:  # from now on no connection comes here
                row[Field.CORDONED], child.retire_at = 1, now + CORDON_SECONDS
            else:
                child.retire_if_due(now)

    def _start_shard(self, index: int) -> None:
        try:
            new = self._context.spawner.shard(index)
        except OSError as exc:
            if not self._context.is_ready:  # none has served yet
                self._context.children.kill()
                raise ShardFailed(f"shard {index} could not be started: {exc}", []) from exc
            seconds = self._context.restarts.could_not_start(index, time.monotonic())
            text = "shard %d could not be started; trying again in %g s: %s"
            log.warning(text, index, seconds, exc, extra={"shard": index})
            return
        self.links.add(new)

    def _replace_blocked(self) -> None:
        """Kill shards whose steps are abandoned or block their loops."""
        now, at, context = time.monotonic(), now_microseconds(), self._context
        limit = context.config.step_timeout_seconds
        if not context.is_placing or now < self._replaces_at:
            return
        self._replaces_at = now + shard_policies.POLL_SECONDS
        for child in context.children.shards:
            row = context.scoreboard[child.index]
            if child.is_retired or row[Field.PID] != child.pid:
                continue
            held, beat = blocked_seconds(row, at), row[Field.HEARTBEAT]
            if held >= shard_policies.PATIENCE_SECONDS and beat != child.last_beat:
                # Decide at the next poll: all processes may have been suspended for a while.
                child.last_beat = beat
                log.warning("%s has been blocked for %.0f s", child, held, extra=child.log_fields)
                os.kill(child.pid, self._stacks_signal)
                continue
            left, waiting = context.copies.count_left(child) if held else (0, 0)
            is_exclusive = context.plan.exclusive
            wanted = replacement_of(row, at, limit, left, waiting, is_exclusive=is_exclusive)
            if wanted is Replacement.WHEN_IDLE:
                if context.distributor.has_passed_on(row):
                    continue
                child.is_retired = True
                calls = plural(row[Field.ABANDONED], "abandoned call")
                text, seconds = "%s is replaced: %s, running for %.0f s", abandoned_seconds(row, at)
                log.warning(text, child, calls, seconds, extra=child.log_fields)
            elif wanted is not Replacement.NONE:
                child.replaced_for = wanted.value
            else:
                continue
            os.kill(child.pid, signal.SIGKILL)


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
                holder = child.holder
                if holder is not None and self._context.children.find(holder.pid) is holder:
                    with contextlib.suppress(EOFError):
                        self._receive_all(holder)  # the pids of its copies
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
            reason = explain_child(gone)
            how = f"{reason.sentence()} after {gone['seconds']:.1f} s"
            text = "the process with the shared state (pid %d, epoch %d) %s; its sessions ended"
            log.warning(text, *fields.values(), how, extra=fields)
            sessions = self._context.reporter.sessions
            gone |= {"sessions": sessions, "reason": reason.to_json()}
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
        command = "status" if "for memory" in how else "logs"
        return f"{text}; the session has ended. openenv {command} {name} says more."

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
