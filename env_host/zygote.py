# SPDX-License-Identifier: Apache-2.0
"""The host: imports the environment once, forks the processes that serve it, speaks for the dead.

    keeper ──▶ host ──fork──▶ shard 0 … n-1          accept from the shared socket
      ▲         │ ▲  └─fork──▶ isolated sessions      one connection each (`--isolate`)
      └─notify──┘ └── a link from each: ready, sockets that have sessions, sockets to isolate

It has one thread, one `select`, and no event loop, and serves nothing itself: whatever it has
imported its children share, and nothing that an environment does can hurt it.

What happens when

    a shard dies           its clients are told (`last_words`), the keeper too, and its successor is
                           forked at once; later each time when it dies young again and again
    an isolated one dies   its client is told, the keeper too; its slot is free
    the state process dies its sessions are ended by their shards, the keeper is told, the next
                           epoch is forked (`shared_state.py`); before there is one, none begins
    a shard never starts   the host fails, with what the shard said, as if it had failed itself
    the host dies          the kernel kills its children (PDEATHSIG); their links end, too
    SIGTERM                children are asked to end, then killed; exit code 0
    threads after import   a fork would copy locks that nobody lets go: children are started as
                           programs that import for themselves; so also when the import started
                           processes
    too few descriptors    copies of sockets are not kept: such clients see only the end of the
                           connection when their shard dies
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

from . import child, last_words
from .board import Board, Slot, Word
from .children import (
    LOOK_SECONDS,
    Child,
    HeldSockets,
    MemoryWatch,
    back_off_seconds,
    name_of,
    spawn,
    start_program,
    what_forbids_forking,
)
from .errors import ShardFailed
from .fds import SPARE_FDS
from .handover import Message, close_all, packet_pair, receive, send
from .host_news import News
from .limits import Plan
from .protocol import HostConfig, Serving
from .session_cgroup import SessionGroup, SessionGroups
from .session_memory import cap_sentence
from .shard import Orders
from .shared_state import start_state_process

if TYPE_CHECKING:
    from .notify import Notifier
    from .shared_state_process import StateProcess

STOP_SECONDS = 4.5  # for children to end; below the keeper's grace
YOUNG_SECONDS = 5.0  # who dies before had no chance to serve
LINGERING = 16  # processes of isolated sessions that are over, and have not ended

ServeAs = Callable[[Orders, Board, bytes], Never]  # what a forked child does

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
        self._listener = listener
        self._notifier = notifier
        self._notify_fd = notifier.fd
        self._serve_as = serve_as
        self._held = HeldSockets(max(0, max_fds - 2 * SPARE_FDS))
        # Twice: a session's slot is free before its process has ended.
        extra = 2 * plan.max_sessions + LINGERING if plan.isolates else 0
        self._board = Board.create(plan.shards, extra)
        self._news = News(self._board, notifier)
        self._memory = MemoryWatch(config.session_memory_bytes)
        self._inboxes = [packet_pair() for _ in range(plan.shards)]  # reading, writing
        self._children: dict[int, Child] = {}  # by pid
        self._due: dict[int, float] = {}  # shards to be started, and when
        self._deaths: dict[int, int] = dict.fromkeys(range(plan.shards), 0)  # young, in a row
        self._waiting: deque[Message] = deque()  # connections to isolate, without a slot yet
        self._selector = selectors.DefaultSelector()
        self._is_ready = False
        self._stop_by: float | None = None
        self._number = 0
        self._groups: SessionGroups | None = None
        self._can_fork = False

    # The agenda

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            ShardFailed: none could be started.
        """
        self._watch_signals()
        self._open_groups()
        self._get_ready_to_fork()
        try:
            self._start_state()
            self._serve()
        finally:
            if self._state is not None:
                self._state.stop()

    def _serve(self) -> None:
        for index in range(self._plan.shards):
            self._start_shard(index)
        while not (self._stop_by is not None and not self._children):
            self._handle_events(self._seconds_to_wait())
            self._start_due()
            if self._is_ready:
                self._news.tell()
            self._memory.look(self._children.values())
            self._act_on_deadline()

    def _handle_events(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        moments = [*self._due.values()]
        if self._state is not None and self._state.due is not None:
            moments.append(self._state.due)
        if self._stop_by is not None:
            moments.append(self._stop_by)
        if self._is_ready:
            moments.append(self._news.due())
        if (look := self._memory.due(self._children.values())) is not None:
            moments.append(look)
        return max(0.0, min(moments) - now) if moments else None

    # Opening

    def _watch_signals(self) -> None:
        reading, writing = os.pipe()
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._signal_fds = (reading, writing)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in child.HELD_BACK:
            signal.signal(number, lambda *_: None)  # the byte in the pipe is the handler
        self._selector.register(reading, selectors.EVENT_READ, self._on_signal)

    def _open_groups(self) -> None:
        if not (self._plan.isolates and self._config.session_memory_bytes):
            return
        self._groups = SessionGroups()
        if not self._groups.are_available:
            log.warning(
                "isolated sessions have no memory cgroups (%s); what they hold is looked at "
                "instead, %d times a second",
                self._groups.why_not,
                1 / LOOK_SECONDS,
            )

    def _get_ready_to_fork(self) -> None:
        obstacle = what_forbids_forking()
        self._can_fork = obstacle is None
        if obstacle is not None:
            log.warning(
                "%s; so each process that serves imports the environment for itself", obstacle
            )
        child.set_name(f"host {self._config.name}")
        gc.collect()
        gc.freeze()

    # Starting

    def _start_state(self) -> None:
        if self._shared_class is not None:
            spawn = None if self._can_fork else self._spawn_state
            self._state = start_state_process(self._shared_class, self._own_fds, spawn)

    def _spawn_state(self, told: dict[str, Any], fds: tuple[int, ...]) -> int:
        return start_program(self._config, told, fds)

    def _start_shard(self, index: int) -> None:
        slot = self._board[index]
        slot[Word.GENERATION] += 1
        isolated = [c for c in self._children.values() if c.is_isolated and c.holds_slot]
        ours, theirs = packet_pair()
        orders = Orders(
            index=index,
            generation=slot[Word.GENERATION],
            shards=self._plan.shards,
            slots=len(self._board),
            max_sessions=self._plan.share(index),
            exclusive=self._plan.exclusive,
            board_fd=self._board.fd,
            link_fd=theirs.detach(),
            inbox_fd=self._inboxes[index][0].fileno(),
            inbox_fds=tuple(writing.fileno() for _, writing in self._inboxes),
            listen_fd=self._listener.fileno(),
            isolates=self._plan.isolates,
            isolated=len(isolated),
            world=self._state.address if self._state is not None else None,
        )
        self._start(Child(0, orders, ours, time.monotonic()), b"")

    def _start_isolated(self, message: Message) -> None:
        """A process for the session of one connection."""
        fd = message.fds[0]
        index = next((s.index for s in self._free_slots()), None)
        if index is None:
            self._waiting.append(message)  # for a process whose session is over to end
            return
        slot = self._board[index]
        slot[Word.GENERATION] += 1
        ours, theirs = packet_pair()
        orders = Orders(
            index=index,
            generation=slot[Word.GENERATION],
            shards=self._plan.shards,
            slots=len(self._board),
            max_sessions=1,
            exclusive=self._plan.exclusive,
            board_fd=self._board.fd,
            link_fd=theirs.detach(),
            connection_fd=fd,
            since=message.head["since"],
            world=self._state.address if self._state is not None else None,
        )
        slot[Word.PID] = -1  # taken
        started = Child(0, orders, ours, time.monotonic(), connection_fd=fd, group=self._group())
        self._start(started, message.body)

    def _free_slots(self) -> list[Slot]:
        return [
            slot for slot in self._board if slot.index >= self._plan.shards and not slot[Word.PID]
        ]

    def _group(self) -> SessionGroup | None:
        limit = self._config.session_memory_bytes
        if limit is None or self._groups is None or not self._groups.are_available:
            return None
        self._number += 1
        try:
            return self._groups.create(self._number, limit)
        except OSError as exc:
            log.warning("a session has no memory cgroup: %s", exc)
            return None

    def _start(self, started: Child, head: bytes) -> None:
        parent = os.getpid()
        if not self._can_fork:
            started.pid = spawn(self._config, started.orders, head)
        elif (pid := child.fork()) == 0:
            self._become(started, head, parent)
        else:
            started.pid = pid
        os.close(started.orders.link_fd)
        self._children[started.pid] = started
        self._watch(started)

    def _become(self, started: Child, head: bytes, parent: int) -> Never:
        """In the child: leave everything that is the host's behind."""
        self._notifier.silence()
        if started.group is not None:
            _enter(started.group)
        orders = started.orders
        child.settle_in(parent, name_of(orders, self._config.name), self._fds_without(orders))
        self._state = None  # the host's to stop, not ours when we leave through its frames
        self._serve_as(orders, self._board, head)

    def _fds_without(self, orders: Orders) -> list[int]:
        """All descriptors of the host's own, without those of the orders."""
        return list(set(self._own_fds()) - set(orders.fds))

    def _own_fds(self) -> list[int]:
        fds = [*self._signal_fds, self._selector.fileno(), self._listener.fileno()]
        fds += [end.fileno() for pair in self._inboxes for end in pair]
        for other in self._children.values():
            fds += [other.link.fileno(), *(fd for fd, _ in other.held.values())]
            fds += [other.connection_fd] if other.connection_fd is not None else []
        if self._notify_fd is not None:
            fds.append(self._notify_fd)  # what we forked must not keep it open
        if self._state is not None:
            fds.append(self._state.listen_fd)
        return fds

    def _start_due(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            if self._stop_by is None:
                self._start_shard(index)
        if self._state is not None and self._stop_by is None:
            self._state.start_if_due()

    # Hearing

    def _watch(self, watched: Child) -> None:
        self._selector.register(watched.link, selectors.EVENT_READ, lambda: self._hear(watched))

    def _hear(self, speaker: Child) -> None:
        with contextlib.suppress(EOFError):
            while (message := receive(speaker.link)) is not None:
                self._take_in(speaker, message)
            return
        self._selector.unregister(speaker.link)  # its end: SIGCHLD tells the rest

    def _take_in(self, speaker: Child, message: Message) -> None:
        head = message.head
        if head.get("isolate"):
            self._start_isolated(message)
            return
        if head.get("ready"):
            speaker.is_ready = True
            self._tell_ready()
        if "failed" in head:
            speaker.failure = message
        self._held.hold(speaker, head.get("begun", ()), message.fds)
        for token in head.get("ended", ()):
            self._held.let_go(speaker, token)
            self._free_slot(speaker)  # before its process ends: the client may be back by then

    # Deaths

    def _on_signal(self) -> None:
        numbers = os.read(self._signal_fds[0], 4096)
        if {signal.SIGTERM, signal.SIGINT} & set(numbers):
            self._stop()
        if signal.SIGCHLD in numbers:
            self._reap()

    def _reap(self) -> None:
        """Only our own children: what the environment started at its import is its to wait for."""
        for pid in list(self._children):
            try:
                ended, status, usage = os.wait4(pid, os.WNOHANG)
            except ChildProcessError:
                ended, status, usage = pid, 0, None
            if ended:
                peak = usage.ru_maxrss * 1024 if usage is not None else None
                self._bury(self._children.pop(pid), status, peak)
        self._reap_state()

    def _reap_state(self) -> None:
        found = self._state.reap() if self._state is not None else None
        if found is not None and self._stop_by is None:
            log.warning("%s", found.sentence)
            self._notifier.shard_exit(
                shard=None,
                shared_state=True,
                pid=found.pid,
                generation=found.epoch,
                wait_status=found.wait_status,
                sessions=self._news.sessions,
                seconds=found.lived_seconds,
                peak_bytes=found.peak_bytes,
                isolated=False,
                out_of_memory=None,
                detector=None,
                limit_bytes=None,
            )

    def _bury(self, dead: Child, status: int, peak_bytes: int | None) -> None:
        self._hear_last(dead)
        memory = self._out_of_memory(dead)
        sessions = len(dead.held) + (dead.connection_fd is not None)
        if status or dead.held:
            how = last_words.how_it_died(status, out_of_memory=memory)
            self._held.speak_for(dead, self._last_word(dead, how))
        elif dead.connection_fd is not None:  # its client came and went
            os.close(dead.connection_fd)
        self._board[dead.orders.index].clear()
        if dead.group is not None:
            peak_bytes = dead.group.peak_bytes() or peak_bytes
            dead.group.remove()
        self._free_slot(dead)
        if self._waiting and self._stop_by is None:
            self._start_isolated(self._waiting.popleft())
        if self._stop_by is not None or (dead.is_isolated and status == 0):
            return
        self._raise_if_never_ready(dead, status)
        self._notifier.shard_exit(
            shard=dead.orders.index,
            pid=dead.pid,
            generation=dead.orders.generation,
            wait_status=status,
            sessions=sessions,
            seconds=time.monotonic() - dead.started,
            peak_bytes=peak_bytes,
            isolated=dead.is_isolated,
            out_of_memory=memory,
            detector=None if memory is None else "watchdog" if dead.killed_for else "cgroup",
            limit_bytes=self._config.session_memory_bytes if dead.is_isolated else None,
        )
        log.warning("%s %s", dead.what, last_words.how_it_died(status, out_of_memory=memory))
        if not dead.is_isolated:
            self._replace(dead)

    def _hear_last(self, dead: Child) -> None:
        with contextlib.suppress(EOFError):
            while (message := receive(dead.link)) is not None:
                self._take_in(dead, message)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(dead.link)
        dead.link.close()

    def _last_word(self, dead: Child, how: str) -> str:
        if self._stop_by is not None:
            return "The environment is stopping."
        return f"The process of this session ({dead.where}) {how}; the session has ended."

    def _out_of_memory(self, dead: Child) -> str | None:
        if dead.killed_for is not None:
            return dead.killed_for
        if dead.group is not None and dead.group.oom_kills():
            return cap_sentence(self._config.session_memory_bytes)
        return None

    def _raise_if_never_ready(self, dead: Child, status: int) -> None:
        """Before anybody has served, a shard that ends is the host's own failure."""
        if self._is_ready or dead.is_isolated:
            return
        self._kill_all(signal.SIGKILL)
        if status == signal.SIGKILL:  # for memory, maybe: the keeper finds out why we die of it
            os.kill(os.getpid(), signal.SIGKILL)
        if dead.failure is not None:
            head = dead.failure.head
            raise ShardFailed(head["failed"], head["log_tail"])
        how = last_words.how_it_died(status)
        raise ShardFailed(f"{dead.what} {how} before it could serve", [])

    def _replace(self, dead: Child) -> None:
        now = time.monotonic()
        index = dead.orders.index
        is_young = now - dead.started < YOUNG_SECONDS
        self._deaths[index] = self._deaths[index] + 1 if is_young else 0
        self._due[index] = now + back_off_seconds(self._deaths[index])
        self._start_due()

    # Telling

    def _tell_ready(self) -> None:
        shards = [c for c in self._children.values() if not c.is_isolated]
        if self._is_ready or not all(shard.is_ready for shard in shards):
            return
        self._is_ready = True
        self._notifier.ready(
            max_sessions=self._plan.max_sessions,
            serving=Serving.SESSIONS,
            shards=self._plan.shards,
            isolate=self._plan.isolates,
        )

    def _free_slot(self, ended: Child) -> None:
        if ended.is_isolated and ended.holds_slot:
            ended.holds_slot = False
            self._tell_front()

    def _tell_front(self) -> None:
        """A slot is free again."""
        front = next((c for c in self._children.values() if c.orders.index == 0), None)
        if front is not None:
            with contextlib.suppress(OSError):
                send(front.link, Message({"isolated_ended": 1}))

    # Stopping

    def _stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._due.clear()
            close_all([fd for message in self._waiting for fd in message.fds])
            self._waiting.clear()
            self._kill_all(signal.SIGTERM)

    def _act_on_deadline(self) -> None:
        if self._stop_by is not None and time.monotonic() >= self._stop_by:
            self._stop_by = time.monotonic() + STOP_SECONDS
            self._kill_all(signal.SIGKILL)

    def _kill_all(self, number: int) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _enter(group: SessionGroup) -> None:
    try:
        group.enter()
    except OSError as exc:  # serve all the same: the replica's own cap still holds
        log.warning("a session runs without its memory cap: %s", exc)
