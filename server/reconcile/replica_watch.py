# SPDX-License-Identifier: Apache-2.0
"""One replica, watched through its shim's socket.

    shim ──status lines──▶ run() ──▶ replica's row
                               └─ exited ──▶ restart_decision ──▶ pause ──▶ {"op": "start"}

The connection shows that the shim runs: its end is the shim's exit. See `reconciler.py` for
who is responsible when, and for the failure cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ...environments import run_files
from ...environments.engines.local.ports import port_in_use
from ...environments.engines.providers import renew
from ...environments.replica_policy import GiveUp, RestartAfter, restart_decision
from ...environments.replica_state import State, exit_with_shim
from ...environments.run_files import RunFile
from ...environments.shim.client import is_alive, read_status_file
from ...requests_db.records import Replica, RequestError
from ...schema.replica import EARLIER, WAITING, StatusLine, max_sessions_of
from ...schema.states import ReplicaState
from ...system.process.exit_reason import ExitReason
from ...system.text.json_lines import Json, decode_line, encode_line
from ...system.text.units import MB
from ..dispatch.outcomes import error_of_exit

log = logging.getLogger(__name__)

MAX_LINE_BYTES = MB
SHIM_POLL_INTERVAL_SECONDS = 1.0  # after a shim could not be followed
EXITS = ("exits", "exit_kinds")  # fields that a FAILED replica's exit has from its last status
_GIVEN_UP_HINT = "fix what its log shows, then launch it again"

# In these states a session may begin, if its client waits for the server or wakes it.
BEGIN_SESSIONS = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.ASLEEP)


def is_over(state: ReplicaState) -> bool:
    """Return whether the replica will not come back by itself."""
    return state in (ReplicaState.STOPPED, ReplicaState.FAILED)


@dataclass(eq=False)
class ReplicaWatch:
    """Follows one shim, and restarts its server when that is due."""

    replica: Replica  # its row
    run_file: RunFile  # how to start it again
    on_change: Callable[[Replica], Coroutine[Any, Any, None]]
    # Called when the restart budget is spent, with the reason.
    on_give_up: Callable[[Replica, RequestError], Coroutine[Any, Any, None]]
    revive: Callable[[RunFile], None] = run_files.revive  # starts a new shim; blocks
    on_status: Callable[[], None] = lambda: None  # called after each status

    task: asyncio.Task[None] = field(init=False)  # of `run`
    status: StatusLine = field(init=False, default_factory=StatusLine)
    # Set while its server accepts connections.
    accepts: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    is_draining: bool = field(init=False, default=False)
    # Set while exits lead to restarts: from the end of its launch until its `down`.
    is_kept: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    has_failed: bool = field(init=False, default=False)  # before it was kept
    # The request to its shim once it must end, and the deadline (monotonic).
    _drain_op: str = field(init=False, default="drain")
    _drain_until: float = field(init=False, default=0.0)
    _is_to_end: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _exits: list[float] = field(init=False, default_factory=list)  # on the monotonic clock
    was_drained: bool = field(init=False, default=False)  # so it is not wanted any more
    _ready_since: float | None = field(init=False, default=None)
    _handled_generation: int = field(init=False, default=0)
    _restarts_before: int = field(init=False, default=0)  # those that earlier shims have counted
    _writer: asyncio.StreamWriter | None = field(init=False, default=None)

    @property
    def request_id(self) -> str:
        """The launch that started it."""
        return self.run_file.request_id

    @property
    def is_followed(self) -> bool:
        """Whether its server runs and is followed, so that no later attempt has its run file."""
        return self._writer is not None and self.status.get("state") != "exited"

    @property
    def max_sessions(self) -> int | None:
        """The number of sessions that its server can have, once the server has reported it."""
        return max_sessions_of(self.status)

    @property
    def sessions(self) -> int:
        """The number of sessions that its server has."""
        return self.status.get("sessions") or 0

    @property
    def endpoint(self) -> tuple[str, int]:
        """The address at which the gateway reaches its server, by its status or run file."""
        return run_files.endpoint_of(self.run_file, self.status)

    @property
    def _log_fields(self) -> Json:
        return {"replica": self.replica.id, "environment": self.replica.environment}

    def is_of(self, run_file: RunFile) -> bool:
        """Return whether this run file is watched, not one of the same id from another attempt."""
        return self.run_file.created_at == run_file.created_at

    async def run(self) -> None:
        """Watch until the replica is stopped for good, or the task is cancelled."""
        while not is_over(self.replica.state):
            try:
                with contextlib.suppress(OSError):  # no listener: as the end of the connection
                    await self._follow_shim()
                if not is_over(self.replica.state):
                    await self._shim_ended()
            except Exception:
                # An error of ours says nothing about the shim: look again.
                log.exception("cannot follow replica %s", self.replica.id, extra=self._log_fields)
                await asyncio.sleep(SHIM_POLL_INTERVAL_SECONDS)

    async def _follow_shim(self) -> None:
        path = self.run_file.socket_path
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
        self._writer = writer
        try:
            async for line in reader:
                await self._on_status(cast("StatusLine", decode_line(line)))
                self.on_status()
        finally:
            self._writer = None
            writer.close()

    async def _on_status(self, status: StatusLine) -> None:
        if status.get("event") != "status":
            return
        self.status = status
        if self.is_kept.is_set():
            await self.keep()
        await self._ask_to_drain()
        if status["state"] in ("ready", "asleep") and not status.get("held"):
            self.accepts.set()
        else:
            self.accepts.clear()
        if status["state"] == "exited":
            await self._on_exit(status)
            return
        is_stopping = status["state"] == State.STOPPING
        state = ReplicaState.STOPPED if is_stopping else ReplicaState[status["state"].upper()]
        if state is ReplicaState.STARTING and self.replica.state is ReplicaState.ASLEEP:
            state = ReplicaState.ASLEEP  # it wakes
        # A replica is draining once it reports that it accepts no new sessions.
        if status.get("is_draining") and state not in BEGIN_SESSIONS:
            await self._set_state(ReplicaState.DRAINING, pid=status.get("pid"))
            if status["state"] != "stopped":  # it is being stopped since its time is over
                return
        if state is ReplicaState.READY and self._ready_since is None:
            self._ready_since = time.monotonic()
        # Never fewer than before: a new shim counts from 0.
        restarts = self._restarts_before + status.get("restarts", 0)
        restarts = max(self.replica.restarts, restarts)
        await self._set_state(state, pid=status.get("pid"), restarts=restarts)

    async def keep(self) -> None:
        """Restart it from now on, and let its server accept connections if it is held."""
        self.is_kept.set()
        if self.status.get("held"):
            await self._send({"op": "serve"})

    async def drain(self, timeout_seconds: float, *, leaves: bool) -> None:
        """Drain its server: the sessions end in time, then the server, and then `task` is done.

        A shim or agent that does not answer now gets the request as soon as it does. If the replica
        `leaves`, others have its address from now on.
        """
        self.is_draining = True
        self._drain_op = "leave" if leaves else "drain"
        self._drain_until = time.monotonic() + timeout_seconds
        self._is_to_end.set()
        if self.task.done() and not self.was_drained:  # it has ended already
            await self.note_drained()
        await self._ask_to_drain()

    async def _ask_to_drain(self) -> None:
        if self._is_to_end.is_set() and not self.status.get("is_draining"):
            left = max(0.0, self._drain_until - time.monotonic())
            await self._send({"op": self._drain_op, "timeout_seconds": left})

    async def note_drained(self) -> None:
        """Record that it has been drained, and that nothing of it runs any more."""
        await self._set_state(ReplicaState.DRAINING, pid=None)
        await self._set_state(ReplicaState.STOPPED)

    async def _send(self, message: Json) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the end of the connection is seen by its reader
                self._writer.write(encode_line(message))
                await self._writer.drain()

    async def _set_state(self, state: ReplicaState, **changes: object) -> None:
        changed = replace(self.replica, state=state, **changes)  # type: ignore[arg-type]
        if changed != self.replica:
            self.was_drained |= changed.state is ReplicaState.DRAINING
            self.replica = changed
            await self.on_change(changed)

    async def _shim_ended(self) -> None:
        """Act on the shim's end, by its status file; a missing file means that it was stopped."""
        is_local, run_dir = self.run_file.is_local, self.run_file.run_dir
        status = await asyncio.to_thread(read_status_file, run_dir)
        is_stopped = status is None or status["state"] == "stopped"
        if status is None and not is_local:  # its agent may not have written one yet
            is_stopped = await asyncio.to_thread(run_files.read, run_dir) is None
        if status is not None and not is_stopped and is_alive(status):
            await asyncio.sleep(SHIM_POLL_INTERVAL_SECONDS)  # not reached, or cut off
            return
        if not (is_local or is_stopped):
            # Another agent serves the replica, which outlives its agents. The answer to an exit may
            # not have reached the last one.
            self._handled_generation = 0
            await asyncio.sleep(SHIM_POLL_INTERVAL_SECONDS)
            await asyncio.to_thread(run_files.revive, self.run_file)
            return
        if self.is_draining or (status is not None and status.get("is_draining")):
            await self.note_drained()  # even if it was killed, it is not started again
            return
        if status is None or is_stopped:
            await self._set_state(ReplicaState.STOPPED, pid=None)
            return
        reason = ExitReason.from_json(status.get("exit") or exit_with_shim(status))
        await self._restart_or_give_up(reason, ())

    async def _on_exit(self, status: StatusLine) -> None:
        if status["generation"] <= self._handled_generation:
            return
        self._handled_generation = status["generation"]
        assert status["exit"] is not None  # of one that has exited
        reason = ExitReason.from_json(status["exit"])
        await self._restart_or_give_up(reason, tuple(status.get("log_tail") or ()))

    async def _restart_or_give_up(self, reason: ExitReason, tail: tuple[str, ...]) -> None:
        # Until it is kept, its launch or its `down` handles the exit, and ends this watch.
        if not self.is_kept.is_set():
            self.has_failed = True
            self.on_status()
        await self._unless_it_is_to_end(self.is_kept.wait())
        if self.is_draining:
            await self._set_state(ReplicaState.DRAINING, pid=None, exit=reason.to_json())
            return
        now = time.monotonic()
        self._exits.append(now)
        decision = restart_decision(self._exits, ready_since=self._ready_since, now=now)
        self._ready_since = None
        match decision:
            case RestartAfter(seconds=seconds, forgiven=forgiven):
                if forgiven:
                    self._exits = [now]
                await self._set_state(ReplicaState.BACKING_OFF, pid=None, exit=reason.to_json())
                await self._unless_it_is_to_end(asyncio.sleep(seconds))
                if self._is_to_run:
                    await self._start_again()
            case GiveUp(reason=why):
                # Nothing watches the replica from now on, so its row must keep its exits.
                earlier = {key: value for key, value in self.status.items() if key in EXITS}
                last = {**reason.to_json(), EARLIER: earlier}
                self.replica = replace(self.replica, state=ReplicaState.FAILED, pid=None, exit=last)
                error = error_of_exit(f"replica {self.replica.id} (pid {reason.pid})", reason, tail)
                message = f"{error.message}; {why}"
                error = replace(error, message=message, hint=_GIVEN_UP_HINT)
                await self.on_give_up(self.replica, error)

    async def _unless_it_is_to_end(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait for something, but no longer than until it must be drained."""
        waits = [asyncio.ensure_future(each) for each in (wait, self._is_to_end.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    @property
    def _is_to_run(self) -> bool:
        return self.is_kept.is_set() and not self.is_draining

    async def _start_again(self) -> None:
        """Start its server; wait while another process has the port, which is no exit of ours."""
        while self._is_to_run:
            try:
                await asyncio.to_thread(renew, self.run_file)
            except FileNotFoundError:  # wait: the daemon that the next command starts adopts it
                await self._wait(lambda: "openenvd was removed or moved")
                continue
            if self._writer is not None:
                await self._send({"op": "start"})
                return
            self._handled_generation = 0  # a new shim counts from 0
            self._restarts_before = self.replica.restarts + 1
            try:
                await asyncio.to_thread(self.revive, self.run_file)
                return
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:  # a full disk: again, as long as the budget lasts
                    text = "cannot start a shim of replica %s"
                    log.exception(text, self.replica.id, extra=self._log_fields)
                    return
            await self._wait(lambda: port_in_use(self.run_file.port).message)

    async def _wait(self, find_obstacle: Callable[[], str]) -> None:
        """Wait a moment until a server may be started, and report once what it waits for."""
        exit_facts = self.replica.exit or {}
        if WAITING not in exit_facts:
            waiting = f"{await asyncio.to_thread(find_obstacle)}: waiting until that has changed"
            log.warning("replica %s: %s", self.replica.id, waiting, extra=self._log_fields)
            await self._set_state(ReplicaState.BACKING_OFF, exit={**exit_facts, WAITING: waiting})
        await asyncio.sleep(SHIM_POLL_INTERVAL_SECONDS)


def new_replica(run_file: RunFile) -> Replica:
    """Make the row of a replica that was just started."""
    return Replica(
        id=run_file.replica_id,
        environment=run_file.environment,
        ordinal=run_file.ordinal,
        provider=run_file.provider,
        state=ReplicaState.STARTING,
        run_dir=str(run_file.run_dir),
        started_at=time.time(),
    )
