# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor: imports the environment once, forks the processes that serve it.

    shim ──▶ supervisor ──fork──▶ shard 0 … n-1         serve what the lobby passes to them
      ▲        │ ▲      └──fork──▶ isolated sessions     one connection each (`--isolate`)
      └─notify─┘ └── a link from each: ready, sockets of sessions, sockets to isolate
    shared socket ──▶ `Lobby` ──connections──▶ inbox of each shard

It has one thread, one `select`, and no event loop. It accepts every connection (`lobby.py`) and
reads none: whatever it has imported its children share, and nothing that an environment does can
hurt it. The first shard comes with the replica; others are forked when there are sessions for them
and are stopped when there have been none for a while (`shard_policies.py`): the last one only of a
replica that nobody has connected to yet.

What happens when

    a shard exits         clients and shim are notified, and it is restarted at once;
                          later each time when it exits early again and again. Connections that it
                          had taken and not answered are reset
    an isolated one exits client and shim are notified; its slot is free
    the state process     its sessions are ended by their shards, the shim is notified, and the
      exits               next epoch is forked (`shared_state/`); no session begins before
    a shard never starts  the supervisor fails with the shard's error
    the supervisor exits  the kernel kills its children (PDEATHSIG); their links end, too
    SIGTERM               children are asked to exit, then killed; exit code 0
    SIGUSR1               drained: what was accepted is served to its end, also when it waits for
                          the first shard, and no session begins after it; it says so, and when
                          the last has ended, as SIGTERM. Other replicas listen
                          at the same address: the listening sockets are closed here. An address
                          of its own goes on accepting, for HTTP sessions, and answers 503 to
                          clients that want a new one
    SIGUSR2               the same, and the address is others' from now on: an update has replaced
                          this replica
    nobody connects       it says so and exits, if it is to (`sleep_after_seconds`) and no other
                          replica has its address. What connects then is left in the kernel's queue,
                          which is the shim's to watch. With a connection it goes on
    threads after import  a fork would copy locks that stay held: children are started as programs
                          that import for themselves; also when the import started processes.
                          They take seconds to start: all shards come with the replica then
    few descriptors       copies of sockets are not kept: such clients see only the end of the
                          connection when their shard exits
    no room for sessions  what arrives is left in the kernel's queues for the other replicas of
                          the address, for a moment, before it is let wait here
    no room for a process a shard is tried again later; a session's client is refused
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from ...schema.protocol import HostConfig, Serving
from ...system.memory.cgroups import own_group
from ...system.net.listening_sockets import listening
from ...system.process import forking
from ...system.process.backoff import RestartSchedule
from ...system.process.descriptors import Message, receive_message
from ...system.process.prctl import adopt_orphans
from ...system.process.proc import exit_sentence, kill
from ...system.process.signal_pipe import DRAIN_SIGNALS, SignalPipe
from ..environment.plan import ServingPlan
from ..errors import ShardFailed
from ..ipc.fd_messages import ReplicaDoors, carried_bytes
from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from ..shared_state.process import StateProcess
from ..startup import SPARE_FDS
from . import shard_policies
from .children import Child, Children
from .close_notices import SocketCopies, refuse
from .exits import ChildExit, ExitReports, exit_of, facts_of_programs, programs_sentence
from .isolated_sessions import IsolatedSessions, Orphans, rows_for, sessions_in
from .lobby import Lobby, Waiting, most_at_once
from .server_memory import KillCount
from .session_memory import LeftPrograms, MemoryWatchdog
from .shard_policies import Idleness, ShardDemand
from .spawn import Serve, Spawner
from .status_reporter import StatusReporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ipc.reports import Notifier

STOP_SECONDS = 4.5  # for children to exit; below the shim's grace
QUICK_START_SECONDS = 0.5  # of a shard; one that takes longer is not given back as the last
RETRY_SECONDS = 0.05  # until a report that the front could not read is sent again
TURN_SECONDS = 0.25  # for other replicas to accept what this one has no room for
LOOK_SECONDS = 0.03  # between two looks meanwhile whether it has
SIBLINGS_SECONDS = 1.0  # between two looks whether there are others
TAKEN_WHEN_FULL = 8  # connections after each such turn
DRAIN_LOOK_SECONDS = 0.1  # between two looks whether all that is drained has ended
PARK_SECONDS = 0.2  # for connections that are on their way to a shard that is to be stopped
_STOPPING = "The environment is stopping."

log = logging.getLogger("openenvd.env_host")


class Supervisor:
    """The parent of all processes that serve one environment."""

    def __init__(
        self,
        config: HostConfig,
        plan: ServingPlan,
        listeners: Sequence[socket.socket],
        notifier: Notifier,
        serve: Serve,
        max_fds: int,
        shared_class: type | None = None,
        gate_fd: int | None = None,
    ) -> None:
        """Prepare; no process is started before `run`.

        `serve` is called in each forked child; the sessions of a `shared_class` share a state.
        Nothing is accepted before the other end of `gate_fd`, a pipe, is closed.
        """
        self._config = config
        self._shared_class = shared_class
        self._state: StateProcess | None = None
        self._plan = plan
        self._max_fds = max_fds
        self._notifier = notifier
        self._notify_fd = notifier.fd
        extra = rows_for(plan.max_sessions) if plan.isolates else 0
        self._scoreboard = Scoreboard.create(plan.shards, extra)
        for row in self._scoreboard.shard_counters():
            row[Field.MAX_SESSIONS] = plan.share(row.index)
        self._children = Children()
        self._own_group = own_group(is_ours=not config.owns_cgroup)
        self._kills = KillCount(self._own_group)
        self._reports = ExitReports(notifier, self._scoreboard)
        most_copies = max(0, max_fds - 2 * SPARE_FDS - most_at_once(max_fds))
        self._copies = SocketCopies(most_copies, self._children)
        self._spawner = Spawner(config, plan, self._scoreboard, serve, self._leave)
        self._sockets = listeners  # what holds the address, the guard too
        self._lobby = Lobby(
            listening(listeners), self._scoreboard, self._spawner.inboxes, max_fds=max_fds
        )
        keeps_one = plan.keeps_one or shared_class is not None
        self._demand = ShardDemand(plan.shards, least=int(keeps_one))
        self._isolated = IsolatedSessions(self._scoreboard, self._children, self._spawner)
        self._orphans: Orphans | None = None  # where nothing else can become a child of ours
        self._restarts = RestartSchedule()
        self._doors = ReplicaDoors(config.doors, config.replica)
        self._door = self._doors.open()
        self._left = LeftPrograms(self._own_group)
        self._reporter = StatusReporter(self._scoreboard, notifier, self._find_left)
        self._memory = MemoryWatchdog(config.session_memory_bytes)
        self._selector = selectors.DefaultSelector()
        self._is_ready = False
        self._gate_fd = gate_fd
        self._is_listening = False
        self._is_draining = False
        self._idleness = Idleness(config.sleep_after_seconds)
        self._stop_by: float | None = None
        self._turn_until = 0.0  # what arrives is left to other replicas; on the monotonic clock
        self._left_since = 0.0  # since when it is
        self._are_several = False  # replicas at this address, when last looked
        self._has_abandoned = False  # a step runs although its session has ended
        self._abandoned_at = 0.0  # when to look at such next; on the monotonic clock
        self._siblings_until = 0.0  # not to be looked at again; on the monotonic clock

    # The agenda

    def run(self) -> None:
        """Serve until asked to stop; raises `ShardFailed` if one fails before any served."""
        self._signals = SignalPipe((*forking.TAKEN_OVER, *DRAIN_SIGNALS))
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        self._spawner.prepare()
        if self._plan.isolates and self._spawner.can_fork:
            adopt_orphans()
            self._orphans = Orphans(self._children)
        if self._own_group is not None:  # on v2 it may have moved into a group below
            below = own_group(is_ours=not self._config.owns_cgroup)
            self._kills = KillCount(below, self._own_group)
        if (door := self._door) is not None:
            self._selector.register(door, selectors.EVENT_READ, lambda: self._on_door(door))
        if self._gate_fd is not None:
            self._selector.register(self._gate_fd, selectors.EVENT_READ, self._open_gate)
        if not self._spawner.can_fork:
            self._demand = ShardDemand(self._plan.shards, least=self._plan.shards)
        try:
            if self._shared_class is not None:
                start = None if self._spawner.can_fork else self._spawner.start_program
                self._state = StateProcess(self._shared_class, self._own_fds, start)
                self._state.start()
                self._spawner.state_address = self._state.address
            self._supervise()
        finally:
            if self._state is not None:
                self._state.stop()

    def _supervise(self) -> None:
        for index in range(self._demand.wanted):
            self._start_shard(index)
        while self._children or not self._is_stopping:
            self._watch_listener()
            events = self._selector.select(self._seconds_to_wait())
            actions = [key.data for key, _ in events]
            if self._accept in actions:  # first of all, and once: the kernel's queues are short
                self._accept()
            for act in actions:
                if act != self._accept:
                    act()
            self._start_due()
            self._place()
            self._isolated.notify_front()
            if self._is_ready:
                self._reporter.report()
            self._memory.check(self._children)
            self._report_killed_programs()
            self._replace_abandoned()
            self._stop_if_drained()
            self._sleep_if_unused()
            self._act_on_deadline()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        moments = [
            self._stop_by,
            self._restarts.next_due(),
            self._lobby.due(is_placing=self._is_placing),
            self._memory.due(self._children),
            self._turn_until if self._turn_until > now else None,
            now + RETRY_SECONDS if self._isolated.over else None,
        ]
        if self._is_placing:
            moments += [
                self._reporter.due(),
                self._demand.due(),
                self._children.next_retirement(),
                self._kills.due(is_used=self._reporter.sessions > 0),
                self._idleness.due() if self._may_sleep else None,
                self._abandoned_at if self._has_abandoned else None,
                now + DRAIN_LOOK_SECONDS if self._is_draining else None,
                None if self._state is None else self._state.restarts.next_due(),
            ]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    # Connections

    def _watch_listener(self) -> None:
        """Wait for connections while they can be accepted."""
        is_wanted = self._may_accept
        if is_wanted == self._is_listening:
            return
        self._is_listening = is_wanted
        for listener in self._lobby.listeners:
            if is_wanted:
                self._selector.register(listener, selectors.EVENT_READ, self._accept)
            else:
                self._selector.unregister(listener)

    def _open_gate(self) -> None:
        """Accept from now on: the other end of the gate has been closed."""
        if self._gate_fd is not None:
            self._selector.unregister(self._gate_fd)
            os.close(self._gate_fd)
            self._gate_fd = None
            self._idleness.note_use(time.monotonic())

    def _accept(self) -> None:
        if not self._may_accept:
            return
        self._idleness.note_use(now := time.monotonic())
        if not self._has_siblings(now):
            self._lobby.accept()
        elif (room := self._room(now)) > 0:
            self._lobby.accept(room)
        else:
            self._accept_when_full(now)

    def _has_siblings(self, now: float) -> bool:
        """Whether other replicas accept from the same sockets, or did a moment ago."""
        if self._config.shares_address and now >= self._siblings_until:
            self._siblings_until = now + SIBLINGS_SECONDS
            self._are_several = self._doors.are_several()
        return self._are_several

    def _accept_when_full(self, now: float) -> None:
        """Leave what has arrived to the other replicas for a while, then let some of it wait here.

        The latter is for when they have no room either, and for HTTP requests.
        """
        if now >= self._turn_until + LOOK_SECONDS:  # nothing had been left when last looked
            self._left_since = now
        self._turn_until = now + LOOK_SECONDS
        if now - self._left_since >= TURN_SECONDS:
            self._left_since = now
            self._lobby.accept(TAKEN_WHEN_FULL)

    def _room(self, now: float) -> int:
        """Return how many more sessions there may be than connections are here; never too many."""
        self._lobby.look(now)  # first, as connections go
        rows = self._scoreboard.shard_counters()
        waiting = self._lobby.load + sum(row[Field.WAITING] for row in rows)
        return sum(max(0, row[Field.MAX_SESSIONS] - row.load) for row in rows) - waiting

    @property
    def _may_accept(self) -> bool:
        is_here = bool(self._sockets) and self._gate_fd is None
        is_our_turn = time.monotonic() >= self._turn_until
        return is_here and is_our_turn and self._lobby.is_open and not self._is_stopping

    @property
    def _is_placing(self) -> bool:
        return self._is_ready and not self._is_stopping

    def _place(self) -> None:
        """Pass connections on to shards, of which there are as many as are wanted."""
        now = time.monotonic()
        self._lobby.close_refused(now)
        if not self._is_placing:
            return
        self._lobby.look(now)
        rows = self._scoreboard.shard_counters()
        if self._lobby.load:
            self._demand.keep_one()  # what is in memory after a session or request is kept
        self._start_and_stop_shards(self._demand.update(self._load(rows, now), now))
        self._lobby.place(self._demand.wanted, now)
        self._copies.reserve(len(self._lobby))

    def _load(self, rows: list[Counters], now: float) -> int:
        """Return how many shards there is something to do for; one more if none has room."""
        load = self._lobby.load + sum(row.load + row[Field.WAITING] for row in rows)
        if (hung := self._lobby.hung(now)) > 0:
            load = max(load, 1 + hung)
        serving = [row for row in rows if row.is_serving and not row[Field.PARKED]]
        is_full = bool(serving) and not any(row.room for row in serving)
        return max(load, len(serving) + 1) if is_full else load

    def _start_and_stop_shards(self, wanted: int) -> None:
        now = time.monotonic()
        # Forks take as long as a crowd takes to fill the kernel's queue: they come after it.
        is_crowd_arriving, self._lobby.is_crowd_arriving = self._lobby.is_crowd_arriving, False
        for row in self._scoreboard.shard_counters():
            child = self._children.at(row.index)
            is_surplus = row.index >= wanted
            if child is None:
                row[Field.PARKED] = int(is_surplus)
                if not (is_surplus or row.index in self._restarts.scheduled or is_crowd_arriving):
                    self._start_shard(row.index)
            elif child.is_retired or (child.is_replaced and not self._lobby.has_passed_on(row)):
                child.retire_if_due(now)
            elif not is_surplus or not child.is_ready or self._lobby.has_passed_on(row):
                row[Field.PARKED], child.retire_at, child.is_replaced = 0, None, False
            elif child.retire_at is None:  # from now on no connection comes here
                row[Field.PARKED], child.retire_at = 1, now + PARK_SECONDS
            else:
                child.retire_if_due(now)

    def _on_door(self, door: socket.socket) -> None:
        """Take the connections that other replicas have passed on, and another share."""
        # One that arrives without its descriptor, since there was none left, is lost to its client.
        with contextlib.suppress(EOFError, OSError, ValueError, LookupError):
            while (message := receive_message(door)) is not None:
                if "max_sessions" in message.head:
                    self._share_out(int(message.head["max_sessions"]))
                    continue
                data = carried_bytes(message)
                self._idleness.note_use(time.monotonic())
                self._lobby.take(Waiting(message.head["since"], message.fds[0], data))

    def _share_out(self, max_sessions: int) -> None:
        """Have so many sessions from now on; those beyond it go on."""
        if self._plan.isolates:
            max_sessions = min(max_sessions, sessions_in(len(self._scoreboard)))
        self._plan = self._spawner.plan = self._plan.with_sessions(max_sessions, self._max_fds)
        for row in self._scoreboard.shard_counters():
            row[Field.MAX_SESSIONS] = self._plan.share(row.index)
        self._reporter.report_at_once()

    def _close_door(self) -> None:
        if self._door is not None:
            self._selector.unregister(self._door)
            self._door.close()
            self._door = None

    # Starting

    def _start_shard(self, index: int) -> None:
        try:
            new = self._spawner.shard(index, isolated=len(self._isolated))
        except OSError as exc:
            self._retry_later(index, exc)
            return
        if index == 0:  # the front, which was given the number of sessions
            self._isolated.over = 0
        self._add(new)

    def _retry_later(self, index: int, exc: OSError) -> None:
        """Schedule another start of a shard; before any has served, fail."""
        if not self._is_ready:
            self._children.signal(signal.SIGKILL)
            raise ShardFailed(f"shard {index} could not be started: {exc}", []) from exc
        seconds = self._restarts.could_not_start(index, time.monotonic())
        text = "shard %d could not be started, again in %g s: %s"
        log.warning(text, index, seconds, exc, extra={"shard": index})

    def _add(self, new: Child | None) -> None:
        if new is not None:
            self._children.add(new)
            self._selector.register(new.link, selectors.EVENT_READ, lambda: self._on_link(new))

    def _start_due(self) -> None:
        if self._is_stopping:
            return
        for index in self._restarts.take_due(time.monotonic()):
            self._start_shard(index)
        if self._state is not None:
            self._state.start_if_due()

    def _leave(self) -> list[int]:
        """In a child: forget the shim and the state process, which are the supervisor's.

        Otherwise the child would stop the state process when it exits through these frames.
        """
        fds = self._own_fds()
        self._notifier.silence()
        self._state = None
        return fds

    def _own_fds(self) -> list[int]:
        """All descriptors that a child must not keep, unless its configuration names them."""
        fds = [*self._signals.fds, self._selector.fileno(), *self._spawner.fds]
        fds += [*self._children.fds, *self._isolated.fds, *self._lobby.fds]
        fds += [one.fileno() for one in self._sockets]
        fds += [fd for fd in (self._notify_fd, self._gate_fd) if fd is not None]
        if self._door is not None:
            fds.append(self._door.fileno())
        if self._state is not None:
            fds.append(self._state.listen_fd)
        return fds

    # Messages from children

    def _on_link(self, child: Child) -> None:
        if child.link.fileno() < 0:  # reaped in this very iteration, by an earlier event
            return
        with contextlib.suppress(EOFError):
            self._receive_all(child)
            return
        self._selector.unregister(child.link)  # it has closed its end: SIGCHLD tells the rest

    def _receive_all(self, child: Child) -> None:
        while (message := receive_message(child.link)) is not None:
            self._handle(child, message)

    def _receive_last(self, child: Child) -> None:
        with contextlib.suppress(EOFError):
            self._receive_all(child)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.link)
        child.link.close()

    def _handle(self, child: Child, message: Message) -> None:
        head = message.head
        if "isolate" in head:
            self._isolate(message)
        elif "for" in head:
            self._isolated.forward(message)
        elif "ready" in head:
            child.is_ready = True
            if time.monotonic() - child.started_at > QUICK_START_SECONDS:
                self._demand.keep_one()  # the next session is not to wait for that again
            self._report_ready()
        elif "sessions_fail" in head:
            self._reports.note_failure(head["sessions_fail"])
        elif "failed" in head:
            child.failure = message
        else:
            self._copies.update(child, message)
        if head.get("sessions") == 0:
            self._isolated.free_slot(child)

    def _isolate(self, message: Message) -> None:
        if self._is_stopping:
            for fd in message.fds:
                refuse(fd, _STOPPING)
        else:
            self._add(self._isolated.begin(message))

    def _report_ready(self) -> None:
        if self._is_ready or not self._children.are_ready:
            return
        self._is_ready = True
        self._left.note_known()
        self._idleness.note_use(time.monotonic())
        self._notifier.ready(
            max_sessions=self._plan.max_sessions,
            serving=Serving.SESSIONS,
            shards=self._plan.shards,
            isolate=self._plan.isolates,
        )

    # Exits

    def _on_signal(self) -> None:
        numbers = self._signals.take()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            self._stop()
        elif numbers & {*DRAIN_SIGNALS}:
            self._drain(is_replaced=signal.SIGUSR2 in numbers)
        if signal.SIGCHLD in numbers:
            ended = []
            for child, status, peak_bytes in self._children.reap():
                if child.is_isolated:
                    ended.append(child.started_at)
                self._receive_last(child)
                exited = exit_of(
                    child,
                    status,
                    peak_bytes,
                    sessions=self._sessions_of(child),
                    limit_bytes=self._config.session_memory_bytes,
                    kills=self._kills,
                )
                self._on_exit(exited)
            if self._orphans is not None:
                self._orphans.look(self._state_pid, ended_since=min(ended, default=None))
            self._reap_state()

    def _report_killed_programs(self) -> None:
        """Report programs of the environment that were killed for memory; their sessions go on."""
        if not self._is_ready or self._is_stopping:
            return
        cap = self._config.session_memory_bytes
        counts = [(each.kills, [each.pid], cap) for each in self._children if each.kills]
        for kills, pids, limit in [*counts, (self._kills, self._children.pids, None)]:
            self._report_programs(kills, kills.take_others(pids), limit)

    def _report_programs(self, kills: KillCount, count: int, limit: int | None) -> None:
        if count:
            facts = facts_of_programs(kills, count, limit)
            self._reports.report(facts)
            log.warning("%s", programs_sentence(facts))

    @property
    def _state_pid(self) -> int | None:
        return None if self._state is None else self._state.pid

    def _find_left(self) -> list[dict[str, Any]]:
        """Look, while no session is open, for programs that ended sessions left running."""
        left = self._left.look({*self._children.pids, self._state_pid})
        self._reports.note_left(left)
        return left

    def _replace_abandoned(self) -> None:
        """Replace shards with abandoned steps; end isolated sessions that have one."""
        now = time.monotonic()
        self._has_abandoned = any(row[Field.ABANDONED] for row in self._scoreboard)
        if not (self._has_abandoned and self._is_placing) or now < self._abandoned_at:
            return
        self._abandoned_at = now + shard_policies.ABANDONED_POLL_SECONDS
        self._reporter.unsettle()
        moment = now_microseconds()
        for child in list(self._children):
            row = self._scoreboard[child.index]
            if child.is_retired or child.is_replaced or row[Field.PID] != child.pid:
                continue
            wanted = shard_policies.replacement_of(
                row, moment, is_exclusive=self._plan.exclusive or child.is_isolated
            )
            if wanted is shard_policies.Replacement.NONE:
                continue
            text = "%s is replaced: %s"
            log.warning(text, child, shard_policies.describe(row, moment), extra=child.log_fields)
            if wanted is shard_policies.Replacement.AT_ONCE:
                child.replaced_for = shard_policies.STARVED
            elif child.is_isolated:
                child.is_retired = True
            else:
                row[Field.PARKED], child.retire_at = 1, now + PARK_SECONDS
                child.is_replaced = True
                continue
            os.kill(child.pid, signal.SIGKILL)

    def _sessions_of(self, child: Child) -> int:
        """Return how many sessions a child that has exited had, with a WebSocket or without."""
        row = self._scoreboard[child.index]
        if child.is_isolated:
            return max(int(child.holds_slot), row[Field.ENDED])
        if self._plan.isolates:  # its row counts the sessions that have processes of their own
            return 0
        return max(row[Field.SESSIONS], row[Field.ENDED])

    def _reap_state(self) -> None:
        facts = self._state.reap() if self._state is not None else None
        if facts is not None and not self._is_stopping:
            fields = {"pid": facts["pid"], "generation": facts["generation"]}
            how = f"{exit_sentence(facts['wait_status'])} after {facts['seconds']:.1f} s"
            text = "the process with the shared state (pid %d, epoch %d) %s; its sessions ended"
            log.warning(text, *fields.values(), how, extra=fields)
            self._reports.report(facts | {"sessions": self._reporter.sessions})

    def _on_exit(self, exited: ChildExit) -> None:
        child = exited.child
        if child.kills is not None:
            cap = self._config.session_memory_bytes
            self._report_programs(child.kills, child.kills.take_rest(), cap)
        self._clean_up(exited)
        self._reporter.unsettle()
        self._isolated.free_slot(child)
        if self._is_stopping:
            return
        self._add(self._isolated.begin_next())
        if exited.is_expected:
            return
        self._raise_if_never_ready(exited)
        self._reports.report(exited.facts)
        log.warning("%s %s", child, exited.how, extra=child.log_fields)
        if not child.is_isolated:
            seconds = exited.facts["seconds"]
            self._restarts.exited(child.index, seconds=seconds, now=time.monotonic())
            self._start_due()

    def _clean_up(self, exited: ChildExit) -> None:
        """Notify the clients of a child that has exited, free its row, remove its cgroup."""
        child = exited.child
        if exited.wait_status or child.socket_copies:
            text = f"The process of this session ({child.where}) {exited.how}"
            text = _STOPPING if self._is_stopping else f"{text}; the session has ended."
            self._copies.notify_clients(child, text, self._accept)
        elif child.connection_fd is not None:  # its client came and went
            os.close(child.connection_fd)
        row = self._scoreboard[child.index]
        self._idleness.note_use(row[Field.HEARTBEAT] / MICROSECONDS)
        row.clear()
        if child.is_isolated:  # what its session has started ends with it
            kill(child.pid, group=True)
        else:
            row[Field.MAX_SESSIONS] = self._plan.share(child.index)
            self._lobby.shard_exited(child.index)
        if child.group is not None:
            child.group.kill()
            child.group.remove()

    def _raise_if_never_ready(self, exited: ChildExit) -> None:
        """Fail when a shard exits before any has served."""
        if self._is_ready or exited.child.is_isolated:
            return
        self._children.signal(signal.SIGKILL)
        if exited.wait_status == signal.SIGKILL:  # for memory? the shim finds out why we die of it
            os.kill(os.getpid(), signal.SIGKILL)
        raise exited.failure

    # Draining

    def _drain(self, *, is_replaced: bool) -> None:
        """Serve what has been accepted to its end, and begin no session any more."""
        if self._is_draining or self._is_stopping:
            return
        self._is_draining = True
        now = now_microseconds()
        for row in self._scoreboard:
            row[Field.DRAINING] = now
        if is_replaced or self._config.shares_address:  # it is the other replicas', too
            self._close_listeners()
        self._notifier.report(draining=True)

    def _close_listeners(self) -> None:
        """Leave what has not been accepted to the other replicas."""
        sockets, self._sockets = self._sockets, ()
        self._watch_listener()
        self._lobby.listeners = ()
        for one in sockets:
            one.close()

    def _stop_if_drained(self) -> None:
        has_settled = self._idleness.has_settled(time.monotonic())
        if not self._is_draining or self._lobby.load or self._isolated or not has_settled:
            return
        rows = self._scoreboard.shard_counters()
        if all(row[Field.IDLE] or not row[Field.PID] for row in rows):
            self._stop()

    # Sleeping

    @property
    def _may_sleep(self) -> bool:
        return self._is_placing and self._gate_fd is None and not self._is_draining

    def _sleep_if_unused(self) -> None:
        """End when nobody has used the replica for so long, if it is alone at its address."""
        now, due = time.monotonic(), self._idleness.due()
        if due is None or now < due or not self._may_sleep:
            return
        self._lobby.look(now)  # first, as connections go
        self._idleness.note_shards(self._scoreboard.shard_counters(), now)
        if self._lobby.load or self._isolated or self._has_siblings(now):
            self._idleness.note_use(now)
        elif (self._idleness.due() or now) <= now:
            self._notifier.report(sleeps=True)
            self._stop()

    # Stopping

    @property
    def _is_stopping(self) -> bool:
        return self._stop_by is not None

    def _stop(self) -> None:
        if not self._is_stopping:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._restarts.cancel()
            self._isolated.cancel()
            self._lobby.stop(_STOPPING)
            self._close_door()
            for row in self._scoreboard:
                row[Field.STOPPING] = 1
            self._children.signal(signal.SIGTERM)

    def _act_on_deadline(self) -> None:
        if self._stop_by is not None and time.monotonic() >= self._stop_by:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._children.signal(signal.SIGKILL)
