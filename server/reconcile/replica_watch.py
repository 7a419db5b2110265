# SPDX-License-Identifier: Apache-2.0
"""One replica, watched through its shim's socket.

    shim ──status lines──▶ run() ──▶ replica's row
                               └─ exited ──▶ restart_decision ──▶ pause ──▶ {"op": "start"}

The connection itself is the sign of life: its end is the shim's death. See `reconciler.py` for
who is responsible when, and for the failure cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import Protocol

from ...environments import run_files
from ...environments.restart_policy import GiveUp, RestartAfter, restart_decision
from ...environments.run_files import RunFile
from ...processes.exits.exit_reason import ExitKind, ExitReason
from ...requests_db.records import Json, Replica
from ...requests_db.states import ReplicaState
from ...shim.client import read_status_file
from ...system.json_lines import decode_line, encode_line
from ...system.process_identity import ProcessIdentity
from ...system.units import MB

log = logging.getLogger(__name__)

MAX_LINE_BYTES = MB
LOOK_AGAIN_SECONDS = 1.0

_STATE_OF_STATUS = {
    "starting": ReplicaState.STARTING,
    "ready": ReplicaState.READY,
    "stopping": ReplicaState.STOPPED,
    "stopped": ReplicaState.STOPPED,
}


def is_over(state: ReplicaState) -> bool:
    """Whether the replica will not come back by itself."""
    return state in (ReplicaState.STOPPED, ReplicaState.FAILED)


class Caretaker(Protocol):
    """Who is told how a replica is: the reconciler."""

    def serves(self, name: str) -> bool: ...

    async def until_serves(self, name: str) -> None: ...

    async def record(self, replica: Replica) -> None: ...

    async def gave_up(
        self, replica: Replica, reason: ExitReason, why: str, tail: tuple[str, ...]
    ) -> None: ...


class ReplicaWatch:
    """Follows one shim, and starts its server again when that is due."""

    task: asyncio.Task[None]

    def __init__(self, replica: Replica, run_file: RunFile, caretaker: Caretaker) -> None:
        self.replica = replica
        self.status: Json = {}
        self._run_file = run_file
        self._caretaker = caretaker
        self._exits: list[float] = []  # when it died, on the monotonic clock
        self._ready_since: float | None = None
        self._handled_generation = 0
        self._writer: asyncio.StreamWriter | None = None

    @property
    def request_id(self) -> str:
        """The launch that started it."""
        return self._run_file.request_id

    @property
    def _log_fields(self) -> Json:
        return {"replica": self.replica.id, "environment": self.replica.environment}

    def is_of(self, run_file: RunFile) -> bool:
        """Whether this very run file is watched, not one of the same id from another attempt."""
        return self._run_file.created_at == run_file.created_at

    async def run(self) -> None:
        """Watch until the replica is stopped for good, or somebody cancels."""
        while not is_over(self.replica.state):
            try:
                with contextlib.suppress(OSError):  # nobody listens: as the end of the connection
                    await self._follow_shim()
                if not is_over(self.replica.state):
                    await self._shim_ended()
            except Exception:
                # A trouble of ours says nothing about the shim: look again.
                log.exception("cannot follow replica %s", self.replica.id, extra=self._log_fields)
                await asyncio.sleep(LOOK_AGAIN_SECONDS)

    async def _follow_shim(self) -> None:
        reader, writer = await asyncio.open_unix_connection(
            self._run_file.socket_path, limit=MAX_LINE_BYTES
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
        await self._become(state, pid=status.get("pid"), restarts=status.get("restarts", 0))

    async def believe_ready(self, pid: int | None) -> None:
        """Its launch saw its first server ready; the shim's word of that is on its way here."""
        is_first = self.status.get("generation", 1) == 1
        if is_first and self.replica.state is ReplicaState.STARTING:
            await self._become(ReplicaState.READY, pid=pid)

    async def _become(self, state: ReplicaState, **changes: object) -> None:
        changed = replace(self.replica, state=state, **changes)  # type: ignore[arg-type]
        if changed != self.replica:
            self.replica = changed
            await self._caretaker.record(changed)

    async def _shim_ended(self) -> None:
        """The shim's last word is in its status file; without one, it was killed."""
        status = await asyncio.to_thread(read_status_file, self._run_file.run_dir)
        if status is None or status["state"] == "stopped":
            await self._become(ReplicaState.STOPPED, pid=None)
            return
        if _is_alive(status):  # we could not reach it, or were cut off
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
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
        # Until then its launch, or its `down`, sees to it; both end this watch when they stop it.
        await self._caretaker.until_serves(self.replica.environment)
        now = time.monotonic()
        self._exits.append(now)
        decision = restart_decision(self._exits, ready_since=self._ready_since, now=now)
        self._ready_since = None
        match decision:
            case RestartAfter(seconds=seconds, forgiven=forgiven):
                if forgiven:
                    self._exits = [now]
                await self._become(ReplicaState.BACKING_OFF, pid=None, exit=reason.to_json())
                await asyncio.sleep(seconds)
                if self._caretaker.serves(self.replica.environment):
                    await self._start_again()
            case GiveUp(reason=why):
                self.replica = replace(
                    self.replica, state=ReplicaState.FAILED, pid=None, exit=reason.to_json()
                )
                await self._caretaker.gave_up(self.replica, reason, why, tail)

    async def _start_again(self) -> None:
        if self._writer is not None:
            self._writer.write(encode_line({"op": "start"}))
            await self._writer.drain()
        else:
            self._handled_generation = 0  # a new shim counts anew
            try:
                await asyncio.to_thread(run_files.revive, self._run_file)
            except OSError:  # a full disk, a taken port: tried again, as long as the budget lasts
                log.exception(
                    "cannot start a shim of replica %s", self.replica.id, extra=self._log_fields
                )


def _is_alive(status: Json) -> bool:
    shim: Json | None = status.get("shim")
    return shim is not None and ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()
