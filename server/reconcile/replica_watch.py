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
from typing import Any

from ...environments import run_files
from ...environments.providers.ports import port_in_use
from ...environments.restart_policy import GiveUp, RestartAfter, restart_decision
from ...environments.run_files import RunFile
from ...processes.exits.exit_reason import ExitKind, ExitReason
from ...requests_db.records import Json, Replica, RequestError
from ...requests_db.states import ReplicaState
from ...shim.client import read_status_file
from ...system.json_lines import decode_line, encode_line
from ...system.process_identity import ProcessIdentity
from ...system.units import MB
from ..dispatch.outcomes import error_of_exit
from .status_writer import Timing

log = logging.getLogger(__name__)

MAX_LINE_BYTES = MB
WAITING = "waiting"  # in the exit of a replica: what its restart waits for
_GIVEN_UP_HINT = "fix what its log shows, then launch it again"
_OF_ANOTHER_VERSION = GiveUp("another version of openenvd had started it")
_ANOTHER_VERSION_HINT = "launch it again"

_STATE_OF_STATUS = {
    "starting": ReplicaState.STARTING,
    "ready": ReplicaState.READY,
    "stopping": ReplicaState.STOPPED,
    "stopped": ReplicaState.STOPPED,
}


def is_over(state: ReplicaState) -> bool:
    """Whether the replica will not come back by itself."""
    return state in (ReplicaState.STOPPED, ReplicaState.FAILED)


class Responsibility:
    """For which environments the reconciler restarts replicas.

    While a launch or a `down` runs, that operation is responsible.
    """

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def take_over(self, name: str) -> None:
        """Restart this environment's replicas from now on."""
        self._event(name).set()

    def let_go(self, name: str) -> None:
        """Restart them no more."""
        self._event(name).clear()

    def forget(self, name: str) -> None:
        """Drop the environment, whose watches have ended."""
        self._events.pop(name, None)

    def is_ours(self, name: str) -> bool:
        """Whether the reconciler restarts this environment's replicas."""
        return name in self._events and self._events[name].is_set()

    async def until_ours(self, name: str) -> None:
        """Wait until the reconciler restarts this environment's replicas."""
        await self._event(name).wait()

    def _event(self, name: str) -> asyncio.Event:
        return self._events.setdefault(name, asyncio.Event())


@dataclass(eq=False)
class ReplicaWatch:
    """Follows one shim, and restarts its server when that is due."""

    replica: Replica  # its row
    run_file: RunFile  # how to start it again
    responsibility: Responsibility
    timing: Timing
    on_change: Callable[[Replica], Coroutine[Any, Any, None]]
    # Called when the restart budget is spent, with the reason.
    on_give_up: Callable[[Replica, RequestError], Coroutine[Any, Any, None]]

    task: asyncio.Task[None] = field(init=False)  # of `run`
    status: Json = field(init=False, default_factory=dict)
    _exits: list[float] = field(init=False, default_factory=list)  # on the monotonic clock
    _ready_since: float | None = field(init=False, default=None)
    _handled_generation: int = field(init=False, default=0)
    _writer: asyncio.StreamWriter | None = field(init=False, default=None)

    @property
    def request_id(self) -> str:
        """The launch that started it."""
        return self.run_file.request_id

    @property
    def _log_fields(self) -> Json:
        return {"replica": self.replica.id, "environment": self.replica.environment}

    def is_of(self, run_file: RunFile) -> bool:
        """Whether this very run file is watched, not one of the same id from another attempt."""
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
                await asyncio.sleep(self.timing.look_again_seconds)

    async def _follow_shim(self) -> None:
        reader, writer = await asyncio.open_unix_connection(
            self.run_file.socket_path, limit=MAX_LINE_BYTES
        )
        self._writer = writer
        try:
            async for line in reader:
                await self._on_status(decode_line(line))
        finally:
            self._writer = None
            writer.close()

    async def _on_status(self, status: Json) -> None:
        if status.get("event") != "status":
            return
        self.status = status
        if status["state"] == "exited":
            await self._on_exit(status)
            return
        state = _STATE_OF_STATUS[status["state"]]
        if state is ReplicaState.READY and self._ready_since is None:
            self._ready_since = time.monotonic()
        await self._set_state(state, pid=status.get("pid"), restarts=status.get("restarts", 0))

    async def confirm_ready(self, pid: int | None) -> None:
        """Take the launch's word that the first server is ready; the shim's is still on its way."""
        is_first = self.status.get("generation", 1) == 1
        if is_first and self.replica.state is ReplicaState.STARTING:
            await self._set_state(ReplicaState.READY, pid=pid)

    async def _set_state(self, state: ReplicaState, **changes: object) -> None:
        changed = replace(self.replica, state=state, **changes)  # type: ignore[arg-type]
        if changed != self.replica:
            self.replica = changed
            await self.on_change(changed)

    async def _shim_ended(self) -> None:
        """Find how the shim ended: its status file says; without one, it was killed."""
        status = await asyncio.to_thread(read_status_file, self.run_file.run_dir)
        if status is None or status["state"] == "stopped":
            await self._set_state(ReplicaState.STOPPED, pid=None)
            return
        if _is_alive(status):  # we could not reach it, or were cut off
            await asyncio.sleep(self.timing.look_again_seconds)
            return
        lost = ExitReason(ExitKind.LOST, pid=status.get("pid") or 0)
        reason = ExitReason.from_json(status["exit"]) if status.get("exit") else lost
        await self._restart_or_give_up(reason, ())

    async def _on_exit(self, status: Json) -> None:
        if status["generation"] <= self._handled_generation:
            return
        self._handled_generation = status["generation"]
        reason = ExitReason.from_json(status["exit"])
        await self._restart_or_give_up(reason, tuple(status.get("log_tail") or ()))

    async def _restart_or_give_up(self, reason: ExitReason, tail: tuple[str, ...]) -> None:
        # Until then its launch, or its `down`, handles the exit; both end this watch.
        await self.responsibility.until_ours(self.replica.environment)
        now = time.monotonic()
        self._exits.append(now)
        decision: RestartAfter | GiveUp = _OF_ANOTHER_VERSION
        if self.run_file.is_restartable:
            decision = restart_decision(self._exits, ready_since=self._ready_since, now=now)
        self._ready_since = None
        match decision:
            case RestartAfter(seconds=seconds, forgiven=forgiven):
                if forgiven:
                    self._exits = [now]
                await self._set_state(ReplicaState.BACKING_OFF, pid=None, exit=reason.to_json())
                await asyncio.sleep(seconds)
                if self.responsibility.is_ours(self.replica.environment):
                    await self._start_again()
            case GiveUp(reason=why):
                self.replica = replace(
                    self.replica, state=ReplicaState.FAILED, pid=None, exit=reason.to_json()
                )
                error = error_of_exit(f"replica {self.replica.id} (pid {reason.pid})", reason, tail)
                message = f"{error.message}; {why}"
                hint = _GIVEN_UP_HINT if self.run_file.is_restartable else _ANOTHER_VERSION_HINT
                error = replace(error, message=message, hint=hint)
                await self.on_give_up(self.replica, error)

    async def _start_again(self) -> None:
        if self._writer is not None:
            self._writer.write(encode_line({"op": "start"}))
            await self._writer.drain()
        else:
            self._handled_generation = 0  # a new shim counts anew
            try:
                await self._revive()
            except OSError:  # a full disk: tried again, as long as the budget lasts
                log.exception(
                    "cannot start a shim of replica %s", self.replica.id, extra=self._log_fields
                )

    async def _revive(self) -> None:
        """Start a new shim; wait while another process has the port, which is no exit of ours."""
        while self.responsibility.is_ours(self.replica.environment):
            try:
                await asyncio.to_thread(run_files.revive, self.run_file)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
                await self._wait_for_port()
            else:
                return

    async def _wait_for_port(self) -> None:
        told = self.replica.exit or {}
        if WAITING not in told:
            taken = await asyncio.to_thread(port_in_use, self.run_file.port)
            waiting = f"{taken.message}: waiting until it is free"
            log.warning("replica %s: %s", self.replica.id, waiting, extra=self._log_fields)
            await self._set_state(ReplicaState.BACKING_OFF, exit={**told, WAITING: waiting})
        await asyncio.sleep(self.timing.look_again_seconds)


def _is_alive(status: Json) -> bool:
    shim: Json | None = status.get("shim")
    return shim is not None and ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()
