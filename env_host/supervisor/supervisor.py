# SPDX-License-Identifier: Apache-2.0
"""The host: imports the environment once, forks the processes that serve it, speaks for the dead.

    shim ──▶ host ──fork──▶ shard 0 … n-1          accept from the shared socket
      ▲         │ ▲  └─fork──▶ isolated sessions      one connection each (`--isolate`)
      └─notify──┘ └── a link from each: ready, sockets that have sessions, sockets to isolate

It has one thread, one `select`, and no event loop, and serves nothing itself: whatever it has
imported its children share, and nothing that an environment does can hurt it.

What happens when

    a shard dies           its clients are told (`last_words`), the shim too, and its successor is
                           forked at once; later each time when it dies young again and again.
                           Connections that it had not answered are reset
    an isolated one dies   its client is told, the shim too; its slot is free
    the state process dies its sessions are ended by their shards, the shim is told, the next
                           epoch is forked (`shared_state.py`); before there is one, none begins
    a shard never starts   the host fails, with what the shard said, as if it had failed itself
    the host dies          the kernel kills its children (PDEATHSIG); their links end, too
    SIGTERM                children are asked to end, then killed; exit code 0
    threads after import   a fork would copy locks that nobody lets go: children are started as
                           programs that import for themselves; so also when the import started
                           processes
    too few descriptors    copies of sockets are not kept: such clients see only the end of the
                           connection when their shard dies
    no room for a process  a shard is tried again later; a session's client is refused

    starting.py      makes children           programs.py      those that cannot be forked
    children.py      who lives                held_sockets.py  copies of their connections
    deaths.py        who died, and how
    succession.py    when the next is due     isolating.py     processes of single sessions
    memory_watch.py  who needs too much       host_news.py     how full it is, for the shim
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from typing import TYPE_CHECKING

from ...system import after_fork
from ...system.descriptors import Message, receive_message
from ...system.signal_pipe import SignalPipe
from ..environment.plan import Plan
from ..errors import ShardFailed
from ..ipc.scoreboard import Scoreboard
from ..protocol import HostConfig, Serving
from ..shared_state.setup import start_state_process
from ..startup.fd_limit import SPARE_FDS
from .children import Child, Children
from .exits import Burials, Death, death_of, facts_of, facts_of_state, failure_of, reaped
from .isolated_sessions import IsolatedSessions, slots_for
from .memory_watchdog import MemoryWatch
from .restart_backoff import Succession
from .socket_copies import HeldSockets
from .spawn import ServeAs, Starter
from .status_reporter import News

if TYPE_CHECKING:
    from ..ipc.notify import Notifier
    from ..shared_state.process import StateProcess

STOP_SECONDS = 4.5  # for children to end; below the shim's grace
AGAIN_SECONDS = 0.05  # until what a child had no room to hear is told again

log = logging.getLogger("openenvd.env_host")


class Host:
    """The parent of all that serve one environment. `run` returns when it has been stopped."""

    def __init__(
        self,
        config: HostConfig,
        plan: Plan,
        listener: socket.socket,
        notifier: Notifier,
        serve_as: ServeAs,
        max_fds: int,
        shared_class: type | None = None,  # of the environment, if its sessions share a state
    ) -> None:
        self._config = config
        self._shared_class = shared_class
        self._state: StateProcess | None = None
        self._plan = plan
        self._notifier = notifier
        self._notify_fd = notifier.fd
        scoreboard = Scoreboard.create(
            plan.shards, slots_for(plan.max_sessions) if plan.isolates else 0
        )
        self._children = Children()
        self._held = HeldSockets(max(0, max_fds - 2 * SPARE_FDS))
        self._starter = Starter(self, config, plan, scoreboard, listener, serve_as)
        self._burials = Burials(scoreboard, self._held)
        self._isolated = IsolatedSessions(scoreboard, self._children, self._starter)
        self._succession = Succession()
        self._news = News(scoreboard, notifier)
        self._memory = MemoryWatch(config.session_memory_bytes)
        self._selector = selectors.DefaultSelector()
        self._is_ready = False
        self._stop_by: float | None = None

    # The agenda

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            ShardFailed: none could be started.
        """
        self._signals = SignalPipe(after_fork.TAKEN_OVER)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
        self._starter.get_ready()
        try:
            self._start_state()
            self._serve()
        finally:
            if self._state is not None:
                self._state.stop()

    def _serve(self) -> None:
        for index in range(self._plan.shards):
            self._start_shard(index)
        while self._children or not self._is_stopping:
            self._handle_events(self._seconds_to_wait())
            self._start_due()
            self._isolated.tell_front()
            if self._is_ready:
                self._news.tell()
            self._memory.look(self._children)
            self._act_on_deadline()

    def _handle_events(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        moments = (
            self._succession.next_due(),
            self._state.due if self._state is not None and not self._is_stopping else None,
            self._stop_by,
            self._news.due() if self._is_ready else None,
            now + AGAIN_SECONDS if self._isolated.has_news else None,
            self._memory.due(self._children),
        )
        first = min((moment for moment in moments if moment is not None), default=None)
        return None if first is None else max(0.0, first - now)

    # Starting

    def _start_state(self) -> None:
        if self._shared_class is not None:
            spawn = self._starter.start_state
            self._state = start_state_process(self._shared_class, self.own_fds, spawn)
            self._starter.world = self._state.address

    def _start_shard(self, index: int) -> None:
        try:
            new = self._starter.shard(index, isolated=len(self._isolated))
        except OSError as exc:
            self._put_off(index, exc)
            return
        if index == 0:
            self._isolated.mark_told()
        self._adopt(new)

    def _put_off(self, index: int, exc: OSError) -> None:
        """There was no room for the process of a shard."""
        if not self._is_ready:
            self._children.signal(signal.SIGKILL)
            raise ShardFailed(f"shard {index} could not be started: {exc}", []) from exc
        seconds = self._succession.had_no_room(index, time.monotonic())
        log.warning("shard %d could not be started, again in %g s: %s", index, seconds, exc)

    def _adopt(self, new: Child | None) -> None:
        if new is not None:
            self._children.add(new)
            self._selector.register(new.link, selectors.EVENT_READ, lambda: self._hear(new))

    def _start_due(self) -> None:
        if self._is_stopping:
            return
        for index in self._succession.take_due(time.monotonic()):
            self._start_shard(index)
        if self._state is not None:
            self._state.start_if_due()

    def forget(self) -> None:
        """In a child: the shim and the state process are the host's, not ours, also when we
        leave through the host's frames."""
        self._notifier.silence()
        self._state = None

    def own_fds(self) -> list[int]:
        """All descriptors that a child must not keep, unless its orders say so."""
        fds = [*self._signals.fds, self._selector.fileno(), *self._starter.fds]
        fds += [*self._children.fds, *self._isolated.fds]
        if self._notify_fd is not None:
            fds.append(self._notify_fd)  # what we forked must not keep it open
        if self._state is not None:
            fds.append(self._state.listen_fd)
        return fds

    # Hearing

    def _hear(self, speaker: Child) -> None:
        if speaker.link.fileno() < 0:  # buried in this very turn: its death was told of first
            return
        with contextlib.suppress(EOFError):
            self._hear_all(speaker)
            return
        self._selector.unregister(speaker.link)  # its end: SIGCHLD tells the rest

    def _hear_all(self, speaker: Child) -> None:
        while (message := receive_message(speaker.link)) is not None:
            self._take_in(speaker, message)

    def _hear_last(self, dead: Child) -> None:
        with contextlib.suppress(EOFError):
            self._hear_all(dead)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(dead.link)
        dead.link.close()

    def _take_in(self, speaker: Child, message: Message) -> None:
        head = message.head
        if "isolate" in head:
            self._adopt(self._isolated.begin(message))
        elif "for" in head:
            self._isolated.pass_on(message)
        elif "ready" in head:
            speaker.is_ready = True
            self._tell_ready()
        elif "failed" in head:
            speaker.failure = message
        else:
            self._held.take_in(speaker, message)
        if head.get("sessions") == 0:
            self._isolated.free_slot(speaker)

    def _tell_ready(self) -> None:
        if self._is_ready or not self._children.are_ready:
            return
        self._is_ready = True
        self._notifier.ready(
            max_sessions=self._plan.max_sessions,
            serving=Serving.SESSIONS,
            shards=self._plan.shards,
            isolate=self._plan.isolates,
        )

    # Deaths

    def _on_signal(self) -> None:
        numbers = self._signals.take()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            self._stop()
        if signal.SIGCHLD in numbers:
            self._reap()

    def _reap(self) -> None:
        """Only our own children: what the environment started at its import is its to wait for."""
        for pid, status, peak_bytes in reaped(self._children.pids):
            self._bury(self._children.take(pid), status, peak_bytes)
        self._reap_state()

    def _reap_state(self) -> None:
        ended = self._state.reap() if self._state is not None else None
        if ended is not None and not self._is_stopping:
            log.warning("%s", ended.sentence)
            self._notifier.shard_exit(**facts_of_state(ended, self._news.sessions))

    def _bury(self, dead: Child, status: int, peak_bytes: int | None) -> None:
        self._hear_last(dead)
        limit_bytes = self._config.session_memory_bytes
        death = death_of(dead, status, peak_bytes, limit_bytes)
        self._burials.bury(death, is_stopping=self._is_stopping)
        self._isolated.free_slot(dead)
        if self._is_stopping:
            return
        self._adopt(self._isolated.begin_next())
        if death.is_expected:
            return
        self._raise_if_never_ready(death)
        self._notifier.shard_exit(**facts_of(death, limit_bytes))
        log.warning("%s %s", dead.what, death.how)
        if not dead.is_isolated:
            self._replace(death)

    def _raise_if_never_ready(self, death: Death) -> None:
        """Before anybody has served, a shard that ends is the host's own failure."""
        if self._is_ready or death.child.is_isolated:
            return
        self._children.signal(signal.SIGKILL)
        if death.wait_status == signal.SIGKILL:  # for memory? the shim finds out why we die of it
            os.kill(os.getpid(), signal.SIGKILL)
        raise failure_of(death)

    def _replace(self, death: Death) -> None:
        index, now = death.child.orders.index, time.monotonic()
        self._succession.died(index, lived_seconds=death.lived_seconds, now=now)
        self._start_due()

    # Stopping

    @property
    def _is_stopping(self) -> bool:
        return self._stop_by is not None

    def _stop(self) -> None:
        if not self._is_stopping:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._succession.cancel()
            self._isolated.cancel()
            self._children.signal(signal.SIGTERM)

    def _act_on_deadline(self) -> None:
        if self._stop_by is not None and time.monotonic() >= self._stop_by:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._children.signal(signal.SIGKILL)
