# SPDX-License-Identifier: Apache-2.0
"""The shim's server: what happens to it is fed to the state machine, whose actions are done here.

    messages, exits, clients' requests, time ──▶ `replica_state.py` ──▶ start, drain, stop, kill

While it is asleep, the listening sockets are watched here: a client that connects waits in the
kernel's queue for the next server, which is started at once. Its sleep is no exit: it is neither
counted nor explained. Should that server not start, it has exited, as any other.

Whatever way it ends, all that it left behind is killed and reaped first, and only then its exit is
reported. What is done to the process is in `server_process.py`. Light: a shim imports it.
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
from .server_process import NotifyPipe, ServerProcess

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

        `changed` is called after every change, with whether it must be written to disk; `wake` when
        a client connects while the server is asleep.
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
        self._sleeps = False  # it has reported that it exits because it is not used
        self._signal = 0  # it has reported that it exits because of this signal
        self._is_replaced = False  # others have its address from now on

    @property
    def life(self) -> Life:
        """How far it has come."""
        return self._status.life

    def to_json(self) -> StatusLine:
        """Return the status that clients are sent, but for whose it is."""
        return {
            **self.process.to_json(),
            **self._status.to_json(),
            "oom_kills": self._evidence.oom_kills,
        }

    def begin(self) -> None:
        """Start the first generation."""
        self._carry_out(Action.START)
        self._changed(True)

    def handle(self, event: Event, seconds: float = 0.0) -> None:
        """Do what follows from an event."""
        before = self.life
        self._advance(event, seconds)
        if _visible(self.life) != _visible(before):
            self._changed(True)

    def drain(self, timeout_seconds: float, *, is_replaced: bool) -> None:
        """Let the sessions end, begin none, then stop; after the time-out in any case.

        Of a server that `is_replaced`, others have the address from now on. One that is starting
        ends at once, unless clients wait for it.
        """
        self._is_replaced = is_replaced
        self.handle(Event.DRAIN, timeout_seconds)

    def look(self) -> float:
        """Bound the log and count kills for memory; returns when to look again, in seconds."""
        seconds = self._log.look()
        if self.process.runs and self._evidence.look():
            self._changed(False)
        # When most is printed, and what loops prints without end.
        return BUSY_POLL_INTERVAL_SECONDS if self.life.state is State.STARTING else seconds

    def reap(self) -> None:
        """Reap children. When the server has exited, what it left behind is killed."""
        some_are_left = self.process.reap()
        if self.process.ended is not None:
            # Killed, their own children come to us next, with another SIGCHLD.
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
            # Only the first is tried: clients wait for what replaces or wakes it.
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
                self._status.note_ready(message, time.time())
                self._advance(Event.READY)
            if message.get("draining"):
                self._advance(Event.DRAINS)
            self._sleeps |= bool(message.get("sleeps"))
            self._signal = message.get("stopped_by", self._signal)
            self._status.failed = message.get("failed", self._status.failed)
            self._status.note_served(message)
            if "shard_exit" in message:
                self._status.exits.add(self._evidence.explain_child(message["shard_exit"]))

    def _note_exit(self) -> Event:
        """Note how the server exited: nothing of it is left, or nothing that can be ended."""
        assert self.process.pid is not None
        self._read_messages()
        self._notify.close()
        self._log.bound()  # it is not looked at again
        ended = self.process.ended
        has_slept = self._sleeps and ended is not None and ended[0] == 0
        if has_slept:
            self._status.note_sleep()
            self.process.remove_cgroup()
        else:
            has_drained = self.life.is_draining and self.process.has_ended_as_drained
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
        """Call `wake` when a client connects to one of these; those watched so far no more."""
        for fd in self._watched:
            self._selector.unregister(fd)
        for fd in fds:
            self._selector.register(fd, selectors.EVENT_READ, self._on_client)
        self._watched = fds

    def _on_client(self) -> None:
        if self._watched:  # or another socket was first, in this very round
            self._wake()


def _visible(life: Life) -> tuple[object, ...]:
    """Return the part whose changes are written down and sent at once."""
    return life.state, life.generation, life.is_draining
