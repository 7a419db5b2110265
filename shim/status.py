# SPDX-License-Identifier: Apache-2.0
"""What a shim tells of its server: its state, what it has said, how it ended. Plain data, no
effects; what the process is made of (pid, socket, cgroup) is `server_process.py`'s to tell.

    begin      a new generation is starting; what was said of the last one goes, `last_exit` stays
    take_in    the server has said something (`env_host.protocol` lists what)
    end        it is gone, or could not be started
    state      set by the shim, when it stops what it keeps

Light: a shim imports it.
"""

from __future__ import annotations

from ..system.json_lines import Json


class ServerStatus:
    """Of one server at a time, counted through its generations."""

    def __init__(self) -> None:
        self.state = "starting"
        self.failed: str | None = None  # why it gave up, in its own words
        self.last_exit: Json | None = None
        self._generation = 0
        self._ready_at: float | None = None
        self._sessions = 0
        self._capacity: Json | None = None
        self._info: Json | None = None
        self._exit: Json | None = None
        self._log_tail: list[str] | None = None
        self._shard_exits = 0
        self._last_shard_exit: Json | None = None

    def begin(self) -> None:
        """The next generation; nothing is known of it."""
        self.state = "starting"
        self._generation += 1
        self._ready_at = self._info = self.failed = self._exit = self._log_tail = None
        self._capacity = None
        self._sessions = 0

    def take_in(self, said: Json, now: float) -> None:
        """Note what the server has said at `now` (seconds since the epoch)."""
        if said.get("ready"):
            self._info = said
            self._ready_at = now
            if self.state == "starting":
                self.state = "ready"
        if "sessions" in said:
            self._sessions = said["sessions"]
        if "failed" in said:
            self.failed = str(said["failed"])
        if "capacity" in said:
            self._capacity = said["capacity"]

    def lose_shard(self, told: Json) -> None:
        """The server lost a child of its own, and goes on."""
        self._shard_exits += 1
        self._last_shard_exit = told

    def end(self, reason: Json, log_tail: list[str]) -> None:
        """The server of this generation is gone, with its sessions."""
        self.state = "exited"
        self._exit = self.last_exit = reason
        self._log_tail = log_tail
        self._sessions = 0
        self._capacity = None

    def to_json(self) -> Json:
        """Its part of the status that clients are told (`wire.py`)."""
        told: Json = {
            "state": self.state,
            "generation": self._generation,
            "restarts": max(0, self._generation - 1),
            "ready_at": self._ready_at,
            "sessions": self._sessions,
            "info": self._info,
            "capacity": self._capacity,
            "exit": self._exit,
            "last_exit": self.last_exit,
            "failed": self.failed,
            "shard_exits": self._shard_exits,
            "last_shard_exit": self._last_shard_exit,
        }
        return told if self._log_tail is None else told | {"log_tail": self._log_tail}
