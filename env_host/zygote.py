# SPDX-License-Identifier: Apache-2.0
"""The host: imports the environment once, forks the processes that serve it, speaks for the dead.

    keeper ──▶ host ──fork──▶ shard 0 … n-1          accept from the shared socket
      ▲         │ ▲  └─fork──▶ isolated sessions      one connection each (`--isolate`)
      └─notify──┘ └── a link from each: ready, sockets that have sessions, sockets to isolate

It has one thread, one `select`, and no event loop, and serves nothing itself: whatever it has
imported its children share, and nothing that an environment does can hurt it.

What happens when

    a shard dies           its clients are told (`last_words`), the keeper too, and its successor is
                           forked at once; later each time when it dies young again and again. What
                           it had not answered goes on in another, or its successor
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
    no room for a process  a shard is tried again later; a session's client is refused

How a child is made: `starting.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from . import child, last_words
from .board import Board, Slot, Word, now_microseconds
from .children import Child, HeldSockets, MemoryWatch, back_off_seconds
from .errors import ShardFailed
from .fds import SPARE_FDS
from .handover import Message, close_all, receive, send
from .host_news import News
from .last_words import Traffic
from .limits import Plan
from .protocol import HostConfig, Serving
from .session_memory import cap_sentence
from .shared_state import start_state_process
from .starting import ServeAs, Starter

if TYPE_CHECKING:
    from .notify import Notifier
    from .shared_state_process import StateProcess

STOP_SECONDS = 4.5  # for children to end; below the keeper's grace
YOUNG_SECONDS = 5.0  # who dies before had no chance to serve
AGAIN_SECONDS = 0.05  # until what a child had no room to hear is told again
LINGERING = 16  # processes of isolated sessions that are over, and have not ended

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
        self._held = HeldSockets(max(0, max_fds - 2 * SPARE_FDS))
        # Twice: a session's slot is free before its process has ended.
        extra = 2 * plan.max_sessions + LINGERING if plan.isolates else 0
        self._board = Board.create(plan.shards, extra)
        self._starter = Starter(self, config, plan, self._board, listener, serve_as)
        self._news = News(self._board, notifier)
        self._memory = MemoryWatch(config.session_memory_bytes)
        self._children: dict[int, Child] = {}  # by pid
        self._due: dict[int, float] = {}  # shards to be started, and when
        self._deaths: dict[int, int] = dict.fromkeys(range(plan.shards), 0)  # young, in a row
        self._waiting: deque[Message] = deque()  # connections to isolate, without a slot yet
        self._selector = selectors.DefaultSelector()
        self._is_ready = False
        self._stop_by: float | None = None
        self._freed = 0  # slots of isolated sessions, which the front has not been told of

    # The agenda

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            ShardFailed: none could be started.
        """
        self._watch_signals()
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
        while not (self._stop_by is not None and not self._children):
            self._handle_events(self._seconds_to_wait())
            self._start_due()
            self._tell_front()
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
        if self._freed:
            moments.append(now + AGAIN_SECONDS)
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

    # Starting

    def _start_state(self) -> None:
        if self._shared_class is not None:
            spawn = self._starter.start_state
            self._state = start_state_process(self._shared_class, self.own_fds, spawn)

    def _start_shard(self, index: int) -> None:
        isolated = [c for c in self._children.values() if c.is_isolated and c.holds_slot]
        counted = len(isolated) + len(self._waiting)
        try:
            new = self._starter.shard(index, isolated=counted, world=self._world)
        except OSError as exc:
            self._put_off(index, exc)
            return
        if index == 0:
            self._freed = 0  # it has been told how many there are
        self._adopt(new)

    def _put_off(self, index: int, exc: OSError) -> None:
        """There was no room for the process of a shard."""
        if not self._is_ready:
            self._kill_all(signal.SIGKILL)
            raise ShardFailed(f"shard {index} could not be started: {exc}", []) from exc
        self._deaths[index] += 1
        seconds = back_off_seconds(1 + self._deaths[index])
        self._due[index] = time.monotonic() + seconds
        log.warning("shard %d could not be started, again in %g s: %s", index, seconds, exc)

    def _start_isolated(self, message: Message) -> None:
        """A process for the session of one connection."""
        if not message.fds:  # we had no descriptor left to receive it
            log.warning("a session was lost: the host has too few file descriptors (ulimit -n)")
            self._freed += 1
            return
        slot = next(iter(self._free_slots()), None)
        if slot is None:
            self._waiting.append(message)  # for a process whose session is over to end
            return
        try:
            new = self._starter.isolated(message, slot, world=self._world)
        except OSError as exc:
            log.warning("a session has no process, its client is refused: %s", exc)
            text = f"There is no room for the process of another session: {exc.strerror}."
            last_words.say_before_handshake(message.fds[0], text)
            self._freed += 1
            return
        if message.head.get("http"):  # the front's question, not the session's connection
            os.close(message.fds[0])
            new.connection_fd = None
        self._adopt(new)

    def _pass_on(self, message: Message) -> None:
        """A connection that is for a session which has its process already."""
        wanted = message.head["for"]
        to = next((c for c in self._children.values() if c.orders.index == wanted), None)
        if to is not None:
            with contextlib.suppress(OSError):
                send(to.link, message)
        close_all(message.fds)

    def _free_slots(self) -> list[Slot]:
        return [
            slot for slot in self._board if slot.index >= self._plan.shards and not slot[Word.PID]
        ]

    def _adopt(self, new: Child) -> None:
        self._children[new.pid] = new
        self._watch(new)

    @property
    def _world(self) -> str | None:
        return self._state.address if self._state is not None else None

    def forget(self) -> None:
        """In a child: the keeper and the state process are the host's, not ours, also when we
        leave through the host's frames."""
        self._notifier.silence()
        self._state = None

    def own_fds(self) -> list[int]:
        """All descriptors that a child must not keep, unless its orders say so."""
        fds = [*self._signal_fds, self._selector.fileno(), *self._starter.fds]
        for other in self._children.values():
            fds += [other.link.fileno(), *(fd for fd, _ in other.held.values())]
            fds += [fd for message in other.waiting.values() for fd in message.fds]
            fds += other.accepted.values()
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
        if speaker.link.fileno() < 0:  # buried in this very turn: its death was told of first
            return
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
        if "for" in head:
            self._pass_on(message)
            return
        if "accepted" in head:
            self._held.keep_accepted(speaker, message)
            return
        if "waits" in head:
            self._held.keep(speaker, message)
            return
        if head.get("ready"):
            speaker.is_ready = True
            self._tell_ready()
        if "failed" in head:
            speaker.failure = message
        self._held.hold(speaker, head.get("begun", ()), message.fds)
        for token in head.get("ended", ()):
            self._held.let_go(speaker, token)
        if head.get("sessions") == 0:
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
        how = last_words.how_it_died(status, out_of_memory=memory)
        sessions = int(dead.holds_slot) if dead.is_isolated else len(dead.held)
        if status or dead.held:
            self._held.speak_for(dead, self._last_word(dead, how))
        elif dead.connection_fd is not None:  # its client came and went
            os.close(dead.connection_fd)
        self._board[dead.orders.index].clear()
        self._find_another(dead, how)
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
        log.warning("%s %s", dead.what, how)
        if not dead.is_isolated:
            self._replace(dead)

    def _find_another(self, dead: Child, how: str) -> None:
        """What a shard had not answered goes on in another, or in its successor; of what it had
        begun to read, and we do not have, the client is told."""
        text = f"The process of this connection ({dead.where}) {how}; connect again."
        waiting = self._held.take_waiting(dead)
        for fd in self._held.take_accepted(dead):
            match last_words.traffic_of(fd):
                case Traffic.NONE:
                    waiting.append(Message({"since": now_microseconds()}, fds=(fd,)))
                case Traffic.READ:
                    last_words.say_before_handshake(fd, text)
                case Traffic.ANSWERED:  # how far, only the dead knew
                    os.close(fd)
        index = self._another_than(dead.orders.index)
        for message in waiting:
            if self._stop_by is None and self._starter.hand_over(index, message):
                close_all(message.fds)
            else:
                last_words.say_before_handshake(message.fds[0], text)

    def _another_than(self, index: int) -> int:
        """A shard that turns; where there is no other, the same one, or the first."""
        now = now_microseconds()
        turning = (slot for slot in self._board.others(index) if slot.is_turning(now))
        other = max(turning, key=lambda slot: slot.room, default=None)
        if other is not None:
            return other.index
        return index if index < self._plan.shards else 0

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
            self._freed += 1

    def _tell_front(self) -> None:
        """Slots are free again; again later, should the front be too slow to hear it now."""
        front = next((c for c in self._children.values() if c.orders.index == 0), None)
        if not self._freed or front is None:
            return  # its successor is told the number that there are
        with contextlib.suppress(OSError):
            if not send(front.link, Message({"isolated_ended": self._freed})):
                return
        self._freed = 0

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
