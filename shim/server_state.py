# SPDX-License-Identifier: Apache-2.0
"""One server's life, as its shim leads it: started, heard, looked at, ended, explained.

    from             to        when
    starting         ready     it says so
    starting, ready  exited    it dies, or could not be started
    starting, ready  stopping  its stop is asked for
    exited           starting  its start is asked for
    stopping, exited stopped   nothing of it is left, and its stop was asked for: the shim ends

Whatever way it ends, all that it left behind is killed and collected first (`_reap`), and only
then is it said how it died (`_settle`). `changed` is called after every change, with whether it
must be written down. What is decided stands in `shutdown_policy.py`, what is known in
`status.py`, what is done to the process in `server_process.py`. Light: a shim imports it.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from ..system.cgroups import CgroupManager
from ..system.file_tail import last_lines
from ..system.json_lines import Json
from .log_rotation import BUSY_LOOK_SECONDS, BoundedLog
from .notify_pipe import NotifyPipe
from .server_exit import ExitEvidence, exit_without_start, why_no_server
from .server_process import ServerProcess
from .shutdown_policy import Ending, Step
from .status import ServerStatus

LOG_TAIL_LINES = 20


class ServerStateMachine:
    """Of the server that a run file describes, through its generations."""

    def __init__(
        self,
        run: Json,
        groups: CgroupManager | None,
        selector: selectors.BaseSelector,
        changed: Callable[[bool], None],
        *,
        is_forked: bool,
    ) -> None:
        """`groups` makes its cgroups; `selector` is the agenda's, and hears what it says."""
        self._changed = changed
        self._log_path = run["log_path"]
        self._log = BoundedLog(run["log_path"], run["max_log_bytes"])
        self._server = ServerProcess(run, groups, is_forked=is_forked)
        self._notify = NotifyPipe(selector, self._on_words)
        self._evidence = ExitEvidence(run.get("memory_limit_bytes"))
        self._status = ServerStatus()
        self._ending = Ending()

    @property
    def is_over(self) -> bool:
        """Whether it has been stopped for good."""
        return self._status.state == "stopped"

    @property
    def is_ending(self) -> bool:
        """Whether its stop has been asked for."""
        return self._ending.is_wanted

    @property
    def may_start(self) -> bool:
        """Whether there is none, and one is wanted."""
        return self._status.state == "exited" and not self._ending.is_wanted

    @property
    def deadline(self) -> float | None:
        """When `act_on_deadline` must be called (monotonic)."""
        return self._ending.deadline

    @property
    def listener_fd(self) -> int | None:
        """The socket on which it listens; None when it could not be opened yet."""
        return self._server.listener_fd

    def to_json(self) -> Json:
        """The status that clients are told, but for whose it is."""
        return {
            **self._server.to_json(),
            **self._status.to_json(),
            "oom_kills": self._evidence.oom_kills,
        }

    # Its beginning

    def start(self) -> None:
        """A new generation. `changed` is not called: who starts it looks at it first."""
        self._status.begin()
        try:
            self._server.prepare()
            # Before it starts: with a tight limit it may be killed before `start` has returned.
            self._evidence.begin(self._server.cgroup)
            self._notify.listen_to(self._server.start())
        except OSError as exc:
            self._cannot_start(why_no_server(exc))

    def _cannot_start(self, why: str) -> None:
        failed = f"cannot start: {why}"
        self._server.forget()
        self._status.failed = failed
        self._status.end(exit_without_start(failed), self._log_tail())

    # While it lives

    def look(self) -> float:
        """Bound its log, note who was killed for memory; returns when to look again (seconds)."""
        seconds = self._log.look()
        if self._server.runs and self._evidence.look():
            self._changed(False)
        # When most is printed, and what loops prints without end.
        return BUSY_LOOK_SECONDS if self._status.state == "starting" else seconds

    def _on_words(self) -> None:
        """It has said something, or its end of the pipe is closed."""
        state = self._status.state
        self._hear()
        self._changed(self._status.state != state or self._status.failed is not None)

    def _hear(self) -> None:
        for said in self._notify.messages():
            self._status.take_in(said, time.time())
            if "shard_exit" in said:
                self._status.lose_shard(self._evidence.explain_shard(said["shard_exit"]))

    # Its end

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM now, SIGKILL at the deadline; a second call can only shorten the grace."""
        if not self._ending.want(time.monotonic(), grace_seconds):
            return
        if self._server.pid is None:
            self._settle()
            return
        self._status.state = "stopping"
        self._server.terminate()
        self._changed(True)

    def act_on_deadline(self) -> None:
        """Kill after the grace; or stop waiting for the killed."""
        step = self._ending.step(time.monotonic())
        if step is Step.KILL:
            self._kill_all()
        elif step is Step.SETTLE:
            self._settle()

    def reap(self) -> None:
        """Collect the dead. The server's death ends whatever it left behind."""
        somebody_is_left = self._server.collect()
        if self._server.ended is None:
            return
        if somebody_is_left:
            self._kill_all()  # their own children come to us next, with another SIGCHLD
        else:
            self._settle()

    def _kill_all(self) -> None:
        """SIGKILL everything below us; `reap` goes on until all of it has been collected."""
        self._ending.clear(time.monotonic())
        self._server.kill_all()

    def _settle(self) -> None:
        """Nothing of the server is left (or nothing that can be ended): say how it died."""
        self._ending.settle()
        if self._server.pid is not None:
            self._hear()
            self._notify.close()
            reason = self._explain(self._server.pid)
            self._log.bound()  # nobody will look at it again
            self._status.end(reason, self._log_tail())
            self._server.forget()
        if self._ending.is_wanted:
            self._status.state = "stopped"
            self._server.remove_cgroup()
        self._changed(True)

    def _explain(self, pid: int) -> Json:
        return self._evidence.explain(
            pid,
            self._server.ended,
            is_wanted=self._ending.is_wanted,
            failed=self._status.failed,
        )

    def _log_tail(self) -> list[str]:
        return last_lines(self._log_path, LOG_TAIL_LINES)
