# SPDX-License-Identifier: Apache-2.0
"""A shard: one process with one event loop that serves sessions.

supervisor ───▶ inbox ─▶ Arrival ─┬─▶ served here (`base.py`)
other shards ────▲                └─▶ inbox of another shard: that with its session, with room,
                                      or with the project's own routes (`serving/own_app.py`)

supervisor ◀── link: ready, session processes (`sessions/remote_session.py`)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from ...system.net.connection_limit import turn_away
from ...system.process.descriptors import Message
from ..ipc.fd_messages import MessageChannel, carried_bytes, connection_message
from ..ipc.scoreboard import Field, now_microseconds
from ..serving.mcp import Give, Peers
from .base import ServingProcess
from .connections import Known

if TYPE_CHECKING:
    from .connections import Arrival

STARTING_SECONDS = 1.0  # for a further shard to start
STARTING_POLL_INTERVAL_SECONDS = 0.005

log = logging.getLogger("openenvd.env_host")


class Shard(ServingProcess):
    """One of the processes that take connections from the supervisor."""

    _inboxes: list[MessageChannel]  # of all shards, by index

    async def run(self) -> None:
        """Serve until asked to stop."""
        ends = [socket.socket(fileno=fd) for fd in self._own.inbox_fds]
        self._inboxes = [MessageChannel(end) for end in ends]
        await self.start()
        self._lag.start(paused=bool(self._counters[Field.IDLE]))
        own_end = socket.socket(fileno=self._own.inbox_fd)
        inbox = MessageChannel(own_end, on_message=self._take_connections)
        self.link.send(Message({"ready": True}))
        await self._stopping.wait()
        inbox.close()
        await self.stop()
        self._lag.stop()

    def _hand_over(self, arrival: Arrival, index: int) -> None:
        if (fd := arrival.take_descriptor(None)) is not None:
            self._counters.add(Field.HANDED_OVER)
            known = {"accepted": arrival.accepted, "first_full": arrival.first_full}
            self._send_to(index, fd, arrival.since, bytes(arrival.data), **known)

    def _send_to(
        self, index: int, fd: int, since: int, body: bytes = b"", **known: str | int | None
    ) -> None:
        """Send a connection to another shard."""
        try:
            message = connection_message({"since": [since], **known}, (fd,), body)
        except OSError as exc:
            log.warning("a connection could not be passed to another process: %s", exc)
            turn_away(socket.socket(fileno=fd))
        else:
            self._inboxes[index].send(message)

    def _others(self) -> Peers:
        return Peers(
            owner_of=self._give_to_owner,
            roomier=self._roomier,
            token=self._token,
        )

    def _give_to_owner(self, session_id: str) -> Give | None:
        if (index := self.owners.process(session_id)) is not None:
            return self._giver(index)
        if (replica := self.owners.replica(session_id)) is None:
            return None
        return lambda fd: self.peers.pass_on(replica, fd, now_microseconds())

    def _giver(self, index: int) -> Give:
        return lambda fd: self._send_to(index, fd, now_microseconds())

    async def _roomier(self) -> Give | None:
        """Find the shard with the most room if this one is full; wait for one that is starting."""
        others = self._scoreboard.others(self._own.index)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STARTING_SECONDS
        while not self._counters.room:
            now = now_microseconds()
            if roomy := [row for row in others if row.room and row.is_responsive(now)]:
                return self._giver(max(roomy, key=lambda row: row.room).index)
            if all(row[Field.PID] for row in others) or loop.time() > deadline:
                break
            await asyncio.sleep(STARTING_POLL_INTERVAL_SECONDS)
        return None

    def _take_connections(self, message: Message) -> None:
        """Take connections from the supervisor, or one from another shard."""
        data, head = carried_bytes(message), message.head
        known = head.get("accepted"), head.get("first_full")
        for fd, since in zip(message.fds, head["since"], strict=False):
            self._take_connection(fd, Known(since, data, *known))
        if placed := head.get("placed", 0):  # last, when they are counted as arriving
            self._counters.add(Field.CONNECTIONS, placed)
