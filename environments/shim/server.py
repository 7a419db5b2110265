# SPDX-License-Identifier: Apache-2.0
"""The shim's server: its events go to the state machine, whose actions are carried out here.

    messages, exits, clients' requests, time ──▶ `replica_state.py` ──▶ start, drain, stop, kill

While the server is asleep, its listening sockets are watched here: a client that connects waits in
the kernel's queue for the next server, which is started at once. Its sleep does not count as an
exit, and is not explained. If the next server does not start, that is an exit as any other.

However the server ends, the processes that it left are killed and reaped first; only then its exit
is reported. `server_process.py` has the actions on the process. Shims import this module, so it
imports little.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...system.files.log_files import BUSY_POLL_INTERVAL_SECONDS, BoundedLog, last_lines
from ...system.memory.cgroups import CgroupManager
from ...system.text.json_lines import Json
from ..replica_state import Action, Event, Life, ReplicaStatus, State
from .server_exit import ExitEvidence, exit_without_start, why_no_server
from .server_process import DRAINED, NotifyPipe, ServerProcess

if TYPE_CHECKING:
    from ...schema.replica import RunFileData, StatusLine

LOG_TAIL_LINES = 20


class Server:
    """The server that a run file describes, through its generations."""

    def __init__(
        self,
        run: RunFileData,
        groups: CgroupManager | None,
        selector: selectors.BaseSelector,
        changed: Callable[[bool], None],
        wake: Callable[[], None],
        *,
        is_forked: bool,
        earlier: StatusLine | None,
    ) -> None:
        """Make one that is not started; `earlier` is the last status of an earlier shim.

        `changed` is called after every change, with whether it must be written to the disk; `wake`
        is called when a client connects while the server is asleep.
        """
        self._changed = changed
        self._wake = wake
        self._selector = selector
        self._watched: tuple[int, ...] = ()  # listening sockets, while it is asleep
        self._log_path = run["log_path"]
        self._log = BoundedLog(run["log_path"], run["max_log_bytes"])
        self.process = ServerProcess(run, groups, is_forked=is_forked)
        self._notify = NotifyPipe(selector, self._on_messages)
        self._evidence = ExitEvidence(run.get("memory_limit_bytes"))
        self._status = ReplicaStatus.after_shim(earlier, time.time())
        self._sleeps = False  # whether it has reported that it exits because it is not used
        self._signal = 0  # the signal that it has reported to exit for
        self._is_replaced = False  # whether others have taken over its address

    @property
    def life(self) -> Life:
        """Return its life, in the sense of the state machine."""
        return self._status.life

    def to_json(self) -> StatusLine:
        """Return the status that clients are sent, without the identity of replica and shim."""
        return {
            **self.process.to_json(),
            **self._status.to_json(),
        }

    def begin(self) -> None:
        """Start the first generation."""
        self._carry_out(Action.START)
        self._changed(True)

    def handle(self, event: Event, seconds: float = 0.0) -> None:
        """Record an event, and carry out the action that follows."""
        before = self.life
        self._advance(event, seconds)
        if _visible(self.life) != _visible(before):
            self._changed(True)

    def drain(self, timeout_seconds: float, *, is_replaced: bool) -> None:
        """Begin no sessions, and stop when the last one has ended, or after the time-out.

        If the server `is_replaced`, others have taken over its address. A server that is starting
        ends at once, unless clients wait for it.
        """
        self._is_replaced = is_replaced
        self.handle(Event.DRAIN, timeout_seconds)

    def look(self) -> float:
        """Bound the log, and count kills for memory; return in how many seconds to look again."""
        seconds = self._log.look()
        if self.process.runs:
            self._evidence.look()
        # A server prints most while it starts, and without end if it fails in a loop.
        return BUSY_POLL_INTERVAL_SECONDS if self.life.state is State.STARTING else seconds

    def reap(self) -> None:
        """Reap children. If the server has exited, kill the processes that it left."""
        some_are_left = self.process.reap()
        if self.process.ended is not None:
            # Children of those that are killed become ours, which causes another SIGCHLD.
            self.handle(Event.LEFT if some_are_left else self._note_exit())

    def _advance(self, event: Event, seconds: float = 0.0) -> None:
        self._carry_out(self._status.advance(event, time.monotonic(), seconds))

    def _carry_out(self, action: Action | None) -> None:
        match action:
            case Action.START:
                self._start()
            case Action.DRAIN:
                self.process.drain(is_replaced=self._is_replaced)
            case Action.STOP if self.process.pid is None:
                self._watch_listeners(())
                self.process.remove_cgroup()
                self._advance(Event.GONE)
            case Action.STOP:
                self.process.terminate()
            case Action.KILL:
                self.process.kill_all()
            case Action.GIVE_UP:
                self._advance(self._note_exit())
            case Action.LISTEN:
                self._watch_listeners(self.process.listening_fds)

    def _start(self) -> None:
        self._watch_listeners(())
        self._sleeps, self._signal = False, 0
        try:
            self.process.prepare()
            # Before it starts: with a tight limit it may be killed before `start` has returned.
            self._evidence.begin(self.process.cgroup)
            # Only the first generation is tried, as clients wait for later ones.
            self._notify.watch(self.process.start(is_tried=self.life.generation == 1))
        except OSError as exc:
            self._status.failed = f"cannot start: {why_no_server(exc)}"
            self.process.forget()
            self._report_exit(exit_without_start(self._status.failed))
            self._advance(Event.EXITED)

    def _on_messages(self) -> None:
        """Read messages of the server, or the end of its pipe."""
        state = self.life.state
        self._read_messages()
        self._changed(self.life.state is not state or self._status.failed is not None)

    def _read_messages(self) -> None:
        for message in self._notify.messages():
            if message.get("ready"):
                self._status.note_ready(message)
                self._advance(Event.READY)
            if message.get("draining"):
                self._advance(Event.DRAINS)
            self._sleeps |= bool(message.get("sleeps"))
            self._signal = message.get("stopped_by", self._signal)
            self._status.failed = message.get("failed", self._status.failed)
            self._status.note_served(message)
            if "shard_exit" in message:
                self._evidence.note_child(message["shard_exit"])
                self._status.exits.add(message["shard_exit"])

    def _note_exit(self) -> Event:
        """Record how the server exited; nothing of it is left, or it cannot be ended."""
        assert self.process.pid is not None
        self._read_messages()
        self._notify.close()
        self._log.bound()  # for the last time
        ended = self.process.ended
        has_slept = self._sleeps and ended is not None and ended[0] == 0
        if has_slept:
            self._status.note_sleep()
            self.process.remove_cgroup()
        else:
            has_drained = ended is not None and ended[0] in DRAINED and self.life.is_draining
            is_ours = has_drained or self.life.state is State.STOPPING
            if ended is not None and ended[0] == 0 and not is_ours:
                ended = self._signal, ended[1]  # the status of a process that the signal killed
            reason = self._evidence.explain(
                self.process.pid, ended, stopped_by_us=is_ours, failed=self._status.failed
            )
            self._report_exit(reason)
        self.process.forget()
        return Event.SLEPT if has_slept else Event.EXITED

    def _report_exit(self, reason: Json) -> None:
        tail = last_lines(self._log_path, LOG_TAIL_LINES)
        self._status.note_exit(reason, tail, time.time())

    def _watch_listeners(self, fds: tuple[int, ...]) -> None:
        """Call `wake` when a client connects to one of these sockets, and to no others."""
        for fd in self._watched:
            self._selector.unregister(fd)
        for fd in fds:
            self._selector.register(fd, selectors.EVENT_READ, self._on_client)
        self._watched = fds

    def _on_client(self) -> None:
        if self._watched:  # otherwise another socket of this round was first
            self._wake()


def _visible(life: Life) -> tuple[object, ...]:
    """Return the facts whose changes are written down and sent at once."""
    return life.state, life.generation, life.is_draining
