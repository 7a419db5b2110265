# SPDX-License-Identifier: Apache-2.0
"""The prefork supervisor: imports the environment once, forks the processes that serve it.

    shim ──▶ supervisor ──fork──▶ shard 0 … n-1         serve what is passed to them
      ▲        │ ▲      └──fork──▶ session processes     of a shard's sessions (`--isolate`)
      └─notify─┘ └── a link from each shard: ready, sockets of sessions, session processes
    shared socket ──▶ `Acceptor` ──▶ `Distributor` ──connections──▶ inbox of each shard

It has one thread, one `select`, and no event loop. It accepts every connection (`acceptor.py`) and
reads none: its children share what it has imported, and no environment can harm it.
`shard_policies.py` decides how many shards there are.

What happens when

    a shard exits         clients and shim are notified, and it is restarted at once, or after a
                          growing pause if it keeps exiting early. Connections that it had taken
                          and not answered are reset
    a session's does      its shard and the shim are notified; the session ends
    the state process     shards end its sessions, the shim is notified, and the next epoch is
      exits               forked (`shared_state/`); no session begins before that
    a shard never starts  the supervisor fails with the shard's error
    the supervisor exits  the kernel kills its children (PDEATHSIG); their links end, too
    SIGTERM               children are asked to exit, then killed; exit code 0
    SIGUSR1               drain: what was accepted before is served to its end, even if it still
                          waits for the first shard; no session begins later. The shim is notified.
                          When the last session ends, as SIGTERM. If other replicas listen at the
                          same address, the listening sockets are closed. At an address of its own
                          the replica still accepts HTTP requests, and answers 503 to new sessions
    SIGUSR2               the same, but the address belongs to others from now on: an update has
                          replaced this replica
    no client connects    after `sleep_after_seconds` it notifies the shim and exits, if no other
                          replica has its address. The shim watches the kernel's queue from then on.
                          With an open connection the supervisor continues
    threads after import  a fork would copy locks that stay held: children are started as programs
                          that import for themselves; also when the import started processes.
                          They take seconds to start, so all shards come with the replica
    few descriptors       copies of sockets are not kept: clients see only the end of the connection
                          when their shard exits
    no room for sessions  connections are left in the kernel's queues for the other replicas of the
                          address, for a moment, before they are accepted to wait here. When their
                          time is over, the other replicas are asked before they are refused
    no room for a process a shard is tried again later; a session's client is refused
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING

from ...schema.protocol import HostConfig
from ...system.net.listening_sockets import listening
from ...system.process import forking
from ...system.process.descriptors import receive_message
from ...system.process.signal_pipe import DRAIN_SIGNALS, SignalPipe
from ..environment.plan import ServingPlan
from ..event_loop import drop_imported_loop
from ..ipc.fd_messages import PeerReplicas, connections_in
from ..ipc.scoreboard import Field, Scoreboard, now_microseconds
from ..startup import STOPPING
from .acceptor import Acceptor, Backlog
from .context import SupervisorContext
from .shard_pool import ShardPool
from .spawn import Serve, Spawner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ipc.reports import Notifier

STOP_SECONDS = 4.5  # for children to exit; below the shim's grace
DRAIN_POLL_INTERVAL_SECONDS = 0.1  # between two checks whether the last session has ended


class Supervisor:
    """The parent of all processes that serve one environment, and its life: serve, drain, end."""

    def __init__(
        self,
        config: HostConfig,
        plan: ServingPlan,
        listeners: Sequence[socket.socket],
        notifier: Notifier,
        serve: Serve,
        max_fds: int,
        shared_class: type | None = None,
        barrier_fd: int | None = None,
    ) -> None:
        """Prepare the supervisor; `run` starts the first process.

        `serve` is called in each forked child; the sessions of a `shared_class` share a state.
        Nothing is accepted before the other end of `barrier_fd`, a pipe, is closed.
        """
        self._config = config
        ours = {notifier.fd, barrier_fd, *(one.fileno() for one in listeners)}
        drop_imported_loop()  # first: it and other garbage of the import may hold descriptors
        imported_fds = forking.open_fds() - ours
        scoreboard = Scoreboard.create(plan.shards)
        spawner = Spawner(config, plan, scoreboard, serve, self._leave, imported_fds)
        backlog = Backlog(listening(listeners), max_fds=max_fds)
        self._context = context = SupervisorContext(
            config, spawner, backlog, scoreboard, notifier, max_fds
        )
        self._selector, self._idleness = context.selector, context.idleness
        peers = PeerReplicas(config.doors, config.replica)
        self._control_socket = peers.open()
        self._acceptor = Acceptor(
            context, listeners, peers if config.shares_address else None, barrier_fd
        )
        self._pool = ShardPool(context, shared_class, accept=self._acceptor.accept)
        self._is_draining = False
        self._stop_by: float | None = None

    def run(self) -> None:
        """Serve until asked to stop; raises `ShardFailed` if one fails before any has served."""
        self._signals = SignalPipe((*forking.TAKEN_OVER, *DRAIN_SIGNALS))
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        if (control := self._control_socket) is not None:
            self._selector.register(
                control, selectors.EVENT_READ, lambda: self._on_control_socket(control)
            )
        try:
            self._pool.start()
            self._supervise()
        finally:
            if self._context.state is not None:
                self._context.state.stop()

    def _supervise(self) -> None:
        accept = self._acceptor.accept
        while self._context.children or not self._context.is_stopping:
            self._acceptor.watch()
            events = self._selector.select(self._seconds_to_wait())
            actions = [key.data for key, _ in events]
            if accept in actions:  # first of all, and once: the kernel's queues are short
                accept()
            for act in actions:
                if act != accept:
                    act()
            self._pool.update()
            self._stop_if_drained()
            self._sleep_if_unused()
            if self._stop_by is not None and time.monotonic() >= self._stop_by:
                self._stop_by = time.monotonic() + STOP_SECONDS
                self._context.children.kill()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        moments = [self._stop_by, self._acceptor.due(now), *self._pool.due(now)]
        if self._context.is_placing:
            moments += [
                self._idleness.due() if self._may_sleep else None,
                now + DRAIN_POLL_INTERVAL_SECONDS if self._is_draining else None,
            ]
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    def _on_signal(self) -> None:
        numbers = self._signals.take()
        if stopping := numbers & {signal.SIGTERM, signal.SIGINT}:
            self._context.notifier.report(stopped_by=min(stopping))
            self._stop()
        elif numbers & {*DRAIN_SIGNALS}:
            self._drain(is_replaced=signal.SIGUSR2 in numbers)
        if signal.SIGCHLD in numbers:
            self._pool.links.reap()

    def _on_control_socket(self, control: socket.socket) -> None:
        """Take the connections that peer replicas have passed on, and another quota."""
        # A connection that arrives without its descriptor, because none was free, is lost.
        with contextlib.suppress(EOFError, OSError, ValueError, LookupError):
            while (message := receive_message(control)) is not None:
                if "max_sessions" in message.head:
                    self._pool.assign_quota(int(message.head["max_sessions"]))
                    continue
                self._idleness.note_use(time.monotonic())
                for connection in connections_in(message):
                    self._context.backlog.add(connection)

    def _leave(self) -> None:
        """In a child: forget the shim and the state process, which are the supervisor's.

        Otherwise the child would stop the state process when it exits through these frames.
        """
        self._context.notifier.fd = None
        self._context.state = None

    def _drain(self, *, is_replaced: bool) -> None:
        """Serve what has been accepted to its end, and begin no session any more."""
        if self._is_draining or self._context.is_stopping:
            return
        self._is_draining = True
        now = now_microseconds()
        for row in self._context.scoreboard:
            row[Field.DRAINING] = now
        if is_replaced or self._config.shares_address:  # it is the other replicas', too
            self._acceptor.close_listeners()
        self._context.notifier.report(draining=True)

    def _stop_if_drained(self) -> None:
        if not (self._is_draining and self._idleness.has_settled(time.monotonic())):
            return
        if self._context.distributor.load:
            return
        rows = self._context.scoreboard
        if all(row[Field.IDLE] or not row[Field.PID] for row in rows):
            self._stop()

    @property
    def _may_sleep(self) -> bool:
        return self._context.is_placing and self._acceptor.has_begun and not self._is_draining

    def _sleep_if_unused(self) -> None:
        """End when the replica was unused for its time, if it is alone at its address."""
        now, due = time.monotonic(), self._idleness.due()
        if due is None or now < due or not self._may_sleep:
            return
        self._context.distributor.update(now)  # first: connections move on to the shards' rows
        self._idleness.note_shards(self._context.scoreboard, now)
        if self._context.distributor.load or self._acceptor.has_peers(now):
            self._idleness.note_use(now)
        elif (self._idleness.due() or now) <= now:
            self._context.notifier.report(sleeps=True)
            self._stop()

    def _stop(self) -> None:
        if self._context.is_stopping:
            return
        self._stop_by = time.monotonic() + STOP_SECONDS
        self._context.is_stopping = True
        self._context.distributor.take_back_all()
        self._context.backlog.refuse_all(STOPPING)
        if self._control_socket is not None:
            self._selector.unregister(self._control_socket)
            self._control_socket.close()
            self._control_socket = None
        self._pool.stop()
