# SPDX-License-Identifier: Apache-2.0
"""The server's state machine: started, watched, stopped, and its exit explained.

    from             to        when
    starting         ready     the server reports it
    starting, ready  exited    it exits, or could not be started
    starting, ready  draining  it was asked to drain, and reports that it accepts no new sessions
    starting, ready, stopping  its stop is requested, or the time of its sessions is over
      draining
    ready            asleep    it exits, having said that nobody uses it
    exited, asleep   starting  its start is requested, or a client connects to one that is asleep
    stopping, exited stopped   nothing of it is left, and that was requested: the shim exits
      draining, asleep

While it is asleep, the listening sockets are watched here: a client that connects waits in the
kernel's queue for the next server, which is started at once. Its sleep is no exit: it is neither
counted nor explained. Should that server not start, it has exited, as any other.

Whatever way it ends, all that it left behind is killed and reaped first (`reap`), and only then
its exit is reported (`_settle`). When to end it is decided in `shutdown_policy.py`; what is done to
the process is in `server_process.py`. Light: a shim imports it.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ...system.files.log_files import BUSY_LOOK_SECONDS, BoundedLog, last_lines
from ...system.memory.cgroups import CgroupManager
from ...system.text.json_lines import Json
from .server_exit import ExitEvidence, ExitHistory, exit_without_start, why_no_server
from .server_process import NotifyPipe, ServerProcess
from .shutdown_policy import LEFT_GRACE_SECONDS, ShutdownPolicy, ShutdownStep

if TYPE_CHECKING:
    from ...schema.replica import RunFileData, ServerReport, StatusLine

LOG_TAIL_LINES = 20
_NOTHING_SERVED: StatusLine = {"sessions": 0, "sessions_fail": None, "capacity": None}
_NOTHING_KNOWN: StatusLine = {"ready_at": None, "info": None, "exit": None, **_NOTHING_SERVED}


class ServerStatus:
    """What is known of one server at a time, counted through its generations. No effects."""

    def __init__(self, earlier: StatusLine | None = None) -> None:
        """Begin before the first generation; `earlier` is the last status of an earlier shim."""
        self.state = "starting"
        self.failed: str | None = None  # why the server gave up, in its own words
        self.sleeps = False  # it is about to exit, or has, since nobody uses it
        self.generation = 0
        self._wakes = 0
        self._last_exit: Json | None = None
        self._known = _NOTHING_KNOWN  # of this generation, as clients are sent it
        self._history = ExitHistory.of_earlier_shim(earlier)

    def begin(self) -> None:
        """Begin the next generation; what the last one reported goes, its exit stays."""
        self._wakes += self.state == "asleep"
        self.state, self.sleeps, self.failed = "starting", False, None
        self.generation += 1
        self._known = _NOTHING_KNOWN

    def note_message(self, message: ServerReport, now: float) -> None:
        """Note a message of the server at `now` (seconds since the epoch)."""
        if message.get("ready"):
            self._known = self._known | {"info": message, "ready_at": now}
            if self.state == "starting":
                self.state = "ready"
        if message.get("draining") and self.state in ("starting", "ready"):
            self.state = "draining"
        self.sleeps |= bool(message.get("sleeps"))
        self.failed = message.get("failed", self.failed)
        told = {key: value for key, value in message.items() if key in _NOTHING_SERVED}
        self._known = self._known | cast("StatusLine", told)

    def note_child_exit(self, report: Json) -> None:
        """Note that the server lost a child of its own, and goes on."""
        self._history.add(report)

    def end(self, reason: Json, log_tail: list[str]) -> None:
        """Note that the server of this generation is gone, with its sessions."""
        self.state = "exited"
        self._history.add_server(reason, time.time())
        self._last_exit = reason
        self._known = self._known | {"exit": reason, "log_tail": log_tail, **_NOTHING_SERVED}

    def fall_asleep(self) -> None:
        """Note that the server has exited since nobody used it."""
        self.state = "asleep"
        self._known = self._known | _NOTHING_SERVED

    def to_json(self) -> StatusLine:
        """Return its part of the status that clients are sent (`connections.py`)."""
        return {
            "state": self.state,
            "generation": self.generation,
            "restarts": max(0, self.generation - 1 - self._wakes),
            "wakes": self._wakes,
            "last_exit": self._last_exit,
            "failed": self.failed,
            **self._known,
            **self._history.to_json(),
        }


class ServerStateMachine:
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
        """Make one without a server yet; `earlier` is the last status of an earlier shim.

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
        self._status = ServerStatus(earlier)
        self.shutdown = ShutdownPolicy()

    @property
    def is_over(self) -> bool:
        """Whether it has been stopped for good."""
        return self._status.state == "stopped"

    @property
    def may_start(self) -> bool:
        """Whether there is no server, and one may be started."""
        return self._status.state in ("exited", "asleep") and not self.shutdown.is_ending

    def to_json(self) -> StatusLine:
        """Return the status that clients are sent, but for whose it is."""
        return {
            **self.process.to_json(),
            **self._status.to_json(),
            "oom_kills": self._evidence.oom_kills,
            "is_draining": self.shutdown.is_draining,
        }

    def start(self) -> None:
        """Start a new generation. `changed` is not called: the caller looks at the server first."""
        self._watch_listeners(())
        self._status.begin()
        try:
            self.process.prepare()
            # Before it starts: with a tight limit it may be killed before `start` has returned.
            self._evidence.begin(self.process.cgroup)
            # Only the first is tried: clients wait for what replaces or wakes it.
            self._notify.watch(self.process.start(is_tried=self._status.generation == 1))
        except OSError as exc:
            failed = f"cannot start: {why_no_server(exc)}"
            self.process.forget()
            self._status.failed = failed
            self._status.end(exit_without_start(failed), self._log_tail())

    def look(self) -> float:
        """Bound the log and count kills for memory; returns when to look again, in seconds."""
        seconds = self._log.look()
        if self.process.runs and self._evidence.look():
            self._changed(False)
        # When most is printed, and what loops prints without end.
        return BUSY_LOOK_SECONDS if self._status.state == "starting" else seconds

    def _on_messages(self) -> None:
        """Read messages of the server, or the end of its pipe."""
        state = self._status.state
        self._read_messages()
        self._changed(self._status.state != state or self._status.failed is not None)

    def _read_messages(self) -> None:
        for message in self._notify.messages():
            self._status.note_message(message, time.time())
            if "shard_exit" in message:
                report = self._evidence.explain_child(message["shard_exit"])
                self._status.note_child_exit(report)

    def drain(self, timeout_seconds: float, *, is_replaced: bool = False) -> None:
        """Let the sessions end, begin none, then stop; after the time-out in any case.

        Of a server that `is_replaced`, others have the address from now on. One that is starting
        ends at once, unless clients wait for it.
        """
        if not self.shutdown.drain(time.monotonic(), timeout_seconds):
            return
        if self._status.state not in ("starting", "ready"):
            self.stop(LEFT_GRACE_SECONDS)
            return
        self.process.drain(is_replaced=is_replaced)
        self._changed(True)

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM now, SIGKILL at the deadline; a second call can only shorten the grace."""
        if not self.shutdown.request(time.monotonic(), grace_seconds):
            return
        if self.process.pid is None:
            self._settle()
            return
        self._status.state = "stopping"
        self.process.terminate()
        self._changed(True)

    def act_on_deadline(self) -> None:
        """Do what `shutdown.deadline` asks for, when it has come."""
        step = self.shutdown.step(time.monotonic())
        if step is ShutdownStep.STOP:
            self.stop(LEFT_GRACE_SECONDS)
        elif step is ShutdownStep.KILL:
            self._kill_all()
        elif step is ShutdownStep.GIVE_UP:
            self._settle()

    def reap(self) -> None:
        """Reap children. When the server has exited, what it left behind is killed."""
        some_are_left = self.process.reap()
        if self.process.ended is None:
            return
        if some_are_left:
            self._kill_all()  # their own children come to us next, with another SIGCHLD
        else:
            self._settle()

    def _kill_all(self) -> None:
        """Send SIGKILL to everything below us; `reap` goes on until all of it has been reaped."""
        self.shutdown.note_kill(time.monotonic())
        self.process.kill_all()

    def _settle(self) -> None:
        """Report how the server exited: nothing of it is left, or nothing that can be ended."""
        self.shutdown.note_end()
        if self.process.pid is not None:
            self._read_messages()
            self._notify.close()
            self._log.bound()  # it is not looked at again
            self._end_generation(self.process.pid)
            self.process.forget()
        if self.shutdown.is_ending:
            self._status.state = "stopped"
            self._watch_listeners(())
            self.process.remove_cgroup()
        self._changed(True)

    def _end_generation(self, pid: int) -> None:
        if self._status.sleeps and self.process.ended and self.process.ended[0] == 0:
            self._status.fall_asleep()
            self.process.remove_cgroup()
            self._watch_listeners(self.process.listening_fds)
            return
        reason = self._evidence.explain(
            pid,
            self.process.ended,
            stopped_by_us=self.shutdown.is_requested or self.process.has_drained,
            failed=self._status.failed,
        )
        self._status.end(reason, self._log_tail())

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

    def _log_tail(self) -> list[str]:
        return last_lines(self._log_path, LOG_TAIL_LINES)
