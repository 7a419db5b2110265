# SPDX-License-Identifier: Apache-2.0
"""The status of one replica of an engine: its file, the line that clients are sent, its socket.

It has the fields of a shim's status (`../replica_state.py`), and some of its own. A restarted agent
continues from the file: the state says which step comes next. Deadlines are counted since boot, so
that no step of the clock moves them. Clients are connected as those of a shim are
(`../shim/connections.py`), and cannot tell the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from ...schema.replica import Process, ServerInfo, StatusLine
from ...system.process.exit_reason import ExitKind
from ...system.text.json_lines import Json, encode_line
from ..engines.base import Instance
from ..replica_state import Action, Event, ReplicaStatus, State
from ..run_files import RunFile
from ..shim.connections import Connection, Connections, error_line
from ..shim.files import STATUS_FILE_NAME, open_control_socket, write_json

POLL_INTERVAL_SECONDS = 0.01  # between two checks whether clients have read the last status
LAST_CHECKS = 100


class EngineReplicaStatus(ReplicaStatus):
    """The known facts about one replica. No effects."""

    is_asked: bool = False  # whether the engine may have anything of it
    instance: str | None = None
    pid: int | None = None
    host: str | None = None
    port: int | None = None
    problem: str | None = None
    waiting: str | None = None
    ends_at: float | None = None  # when the engine ends the instance, as `boot_seconds` counts
    # When to request its successor, so that its sessions can end before `ends_at`
    replace_at: float | None = None
    reported: int = 0  # the number of the last exit that the server has reported of its children

    def __init__(self, earlier: StatusLine | None = None) -> None:
        """Continue from a status file, without the facts that may have changed since."""
        super().__init__(earlier)
        vars(self).update({key: value for key, value in (earlier or {}).items() if key in _OWN})
        self.problem = self.ends_at = self.replace_at = None

    def advance(self, event: Event, now: float, seconds: float = 0.0) -> Action | None:
        """Record an event; a new generation keeps the address, and no other fact."""
        before = self.life.generation
        action = super().advance(event, now, seconds)
        if self.life.generation != before:
            self.instance = self.pid = self.waiting = self.ends_at = self.replace_at = None
            self.reported = 0
        return action

    def note_instance(self, instance: Instance) -> bool:
        """Record facts about the instance; return whether any of them is new."""
        before = (self.instance, self.pid, self.ends_at, self.replace_at)
        now = (instance.id, instance.pid or self.pid, instance.ends_at, instance.replace_at)
        self.instance, self.pid, self.ends_at, self.replace_at = now
        return before != now

    def note_ready(self, info: ServerInfo) -> None:
        """Record what the server reports about itself when it is ready; it waits for nothing."""
        super().note_ready(info)
        self.waiting = None

    def note_exit(self, reason: Json, log_tail: list[str], at: float) -> None:
        """Record how the instance of this generation ended, and with it its sessions."""
        super().note_exit(reason, log_tail, at)
        self.pid = self.ends_at = self.replace_at = None

    def note_reported(self, exits: list[Json]) -> bool:
        """Record exits of processes below the server, oldest first; return whether any is new."""
        new = [facts for facts in exits if facts["number"] > self.reported]
        for facts in new:
            self.exits.add({**facts, "life": self.life.generation})
            self.reported = facts["number"]
        return bool(new)

    @property
    def oom_reported_at(self) -> float | None:
        """Return when the server of this generation last reported a kill for memory below it."""
        own = (each for each in self.exits.last if each.get("life") == self.life.generation)
        kills = [each["at"] for each in own if each["reason"]["kind"] == ExitKind.OOM_KILLED]
        return max(kills, default=None)

    def to_json(self) -> StatusLine:
        """Return the status without the replica's and the agent's identity."""
        return {
            **super().to_json(),
            **cast("StatusLine", {name: getattr(self, name) for name in _OWN}),
            "deadline": self.life.deadline,
        }


_OWN = tuple(EngineReplicaStatus.__annotations__)


@dataclass(eq=False)
class StatusServer:
    """The status of one replica: its file, for the next agent, and its clients.

    `handle_command` gets each line of a client, and raises `ValueError`. `agent` is this process.
    """

    run_file: RunFile
    status: EngineReplicaStatus
    agent: Process
    handle_command: Callable[[bytes], None]
    _clients: Connections | None = field(default=None, init=False)
    # Of the clients; the loop watches it as one file
    _selector: selectors.DefaultSelector = field(
        default_factory=selectors.DefaultSelector, init=False
    )

    def publish(self) -> None:
        """Write the status to its file, then send it to the clients."""
        with contextlib.suppress(OSError):  # the disk is full: clients are sent it all the same
            write_json(str(self.run_file.run_dir / STATUS_FILE_NAME), self._to_json())
        self.send_status()

    def report_problem(self, problem: str | None) -> bool:
        """Report why the engine does not do what is due; return whether that is new."""
        is_new = problem != self.status.problem
        self.status.problem = problem
        if is_new:
            self.send_status()
        return is_new

    def report_waiting(self, why: str | None) -> None:
        """Report why a replica that is starting is not ready yet."""
        if why != self.status.waiting and self.status.life.state is State.STARTING:
            self.status.waiting = why
            self.send_status()

    def _to_json(self) -> StatusLine:
        return {
            "event": "status",
            "replica_id": self.run_file.replica_id,
            "agent": self.agent,
            **self.status.to_json(),
        }

    def _answer(self, client: Connection, line: bytes) -> None:
        try:
            self.handle_command(line)
        except ValueError as exc:
            client.queue_reply(error_line(str(exc)))

    def open(self) -> None:
        """Listen, in place of a socket that a killed agent left; raises `OSError`."""
        control = open_control_socket(self.run_file.socket_path)
        self._clients = Connections(
            control, self._selector, lambda: encode_line(self._to_json()), self._answer
        )
        asyncio.get_running_loop().add_reader(self._selector.fileno(), self._serve)

    def _serve(self) -> None:
        for key, _ in self._selector.select(0.0):
            key.data()

    def send_status(self) -> None:
        """Send the status, which has changed, to all clients."""
        if self._clients is not None:
            self._clients.send_status()

    async def close(self) -> None:
        """Stop accepting, send the last status to clients that read it in time, and close."""
        if (clients := self._clients) is None:
            return
        self._clients = None
        with contextlib.suppress(OSError):
            os.unlink(self.run_file.socket_path)  # noqa: PTH108  at once
        clients.admit_no_more()
        clients.send_status()
        for _ in range(LAST_CHECKS):
            if clients.have_unsent:
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        clients.drop_all()
        asyncio.get_running_loop().remove_reader(self._selector.fileno())
        self._selector.close()
