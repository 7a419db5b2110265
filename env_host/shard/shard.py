# SPDX-License-Identifier: Apache-2.0
"""A shard: one process with one event loop that serves sessions.

    supervisor ───▶ inbox ─▶ Arrival ─┬─▶ served here (`base.py`)
    other shards ────▲                └─▶ inbox of another shard: that with its session, with room,
                                          or with the project's own routes (`serving/own_app.py`)

    supervisor ◀── link: ready, a session to isolate

With `isolates`, sessions are not served here: each connection goes to the supervisor, which forks a
process for it (`IsolatedSession`). Later connections for that session (HTTP, `?session_id=`) go to
that process through the supervisor, too:

    supervisor ──connection, and what was read of it──▶ Arrival ──▶ the session; exit at its end
    supervisor ──link: connections for it later──▶ Arrival
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroups import Cgroup
from ...system.net.connection_limit import turn_away
from ...system.process import forking
from ...system.process.descriptors import Message
from ...system.process.prctl import adopt_orphans
from ...system.process.proc import kill_descendants, rollup_bytes
from ..errors import BranchRefused, CapacityReached
from ..ipc.fd_messages import MAX_CARRIED_BYTES, MessageChannel, carried_bytes, connection_message
from ..ipc.scoreboard import Field, now_microseconds
from ..serving.mcp import Give, Peers
from ..sessions.session_process import RemoteEnvironment
from ..startup import cap_sentence
from .base import ServingProcess

if TYPE_CHECKING:
    from ...system.text.json_lines import Json
    from .connections import Arrival

STARTING_SECONDS = 1.0  # for a further shard to start
STARTING_POLL_INTERVAL_SECONDS = 0.005
LEAVING_POLL_INTERVAL_SECONDS = 0.05  # between two checks whether the session is over
MEMORY_CHECK_SECONDS = 0.25  # between two checks of sessions without a cgroup
BEGIN_SECONDS = 30.0  # for an isolated session to begin

log = logging.getLogger("openenvd.env_host")


class Shard(ServingProcess):
    """One of the processes that take connections from the supervisor."""

    _inboxes: list[MessageChannel]  # of all shards, by index

    async def run(self, head: bytes = b"") -> None:
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
        most = None if index < len(self._inboxes) else MAX_CARRIED_BYTES
        if (fd := arrival.take_descriptor(most)) is not None:
            self._counters.add(Field.HANDED_OVER)
            known = {"accepted": arrival.accepted, "first_full": arrival.first_full}
            self._send_to(index, fd, arrival.since, bytes(arrival.data), **known)

    def _send_to(
        self, index: int, fd: int, since: int, body: bytes = b"", **known: str | int | None
    ) -> None:
        """Send a connection to another process; to isolated sessions through the supervisor."""
        if index >= len(self._inboxes):
            self.link.send(Message({"for": index, "since": since, **known}, body, (fd,)))
            return
        try:
            message = connection_message({"since": [since], **known}, (fd,), body)
        except OSError as exc:
            log.warning("a connection could not be passed to another process: %s", exc)
            turn_away(socket.socket(fileno=fd))
        else:
            self._inboxes[index].send(message)

    def _others(self) -> Peers | None:
        return Peers(
            owner_of=self._give_to_owner,
            roomier=self._roomier,
            isolate=self._room_for_isolated if self._own.isolates else None,
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

    async def _room_for_isolated(self) -> Callable[[int], None]:
        """Take a slot for a session over HTTP; return a function that starts its process."""
        if not await self.admission.wait_for_room(lambda: True):
            raise CapacityReached(*self.admission.totals)
        self._isolated += 1
        self._count()

        def start(fd: int) -> None:
            head = {"isolate": True, "http": True, "since": now_microseconds()}
            self.link.send(Message(head, b"", (fd,)))

        return start

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
            self._take_connection(fd, since, data, *known)
        if placed := head.get("placed", 0):  # last, when they are counted as arriving
            self._counters.add(Field.CONNECTIONS, placed)

    def _isolate(self, arrival: Arrival) -> None:
        if (fd := arrival.take_descriptor()) is not None:
            self._isolated += 1
            self._count()
            head = {"isolate": True, "since": arrival.since, "accepted": arrival.accepted}
            self.link.send(Message(head, bytes(arrival.data), (fd,)))

    def _on_link(self, message: Message) -> None:
        self._isolated -= message.head["isolated_ended"]
        self._count()


class IsolatedSession(ServingProcess):
    """Serves one session, and exits with it, together with the programs that the session started.

    It leads a process group, which the environment may signal, and adopts orphans. If it is killed
    itself, the supervisor ends group and orphans (`supervisor/isolated_sessions.py`). It also holds
    the session's branches, whose environments are in `sessions/session_process.py`.
    """

    async def run(self, head: bytes) -> None:
        """Serve the connection until it is over, or the process is asked to stop."""
        os.setpgid(0, 0)
        adopt_orphans()
        await self.start()
        own = self._own
        self._is_watching = False
        self._asking: deque[asyncio.Future[Json]] = deque()  # for slots
        if sys.platform == "linux":
            self.life_fd, _ = os.pipe()  # the other end is closed when this process exits
            self._base_fds = forking.open_fds() - {*own.imported_fds}
            self.table.branches.forks = self
        else:
            self.table.branches.platform = sys.platform
        assert own.connection_fd is not None
        arrival = await self.arrivals.open(own.connection_fd, own.since, head, own.accepted)
        watching = asyncio.create_task(self._watch(arrival.transport), name="watch-connection")
        stopping = asyncio.create_task(self._stopping.wait(), name="wait-for-signal")
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        stopping.cancel()
        await self.stop()
        kill_descendants()

    async def _watch(self, transport: asyncio.BaseTransport | None) -> None:
        """Return when the session is over, or its connection closed before it began a session."""
        async with asyncio.timeout(BEGIN_SECONDS) as patience:
            while len(self.table) or not (transport is None or transport.is_closing()):
                if len(self.table):
                    patience.reschedule(None)
                    await self.registry.is_over.wait()
                await asyncio.sleep(LEAVING_POLL_INTERVAL_SECONDS)

    async def take_slots(self, count: int, processes: int) -> list[Cgroup]:
        """Ask the supervisor for slots of branches; raises `BranchRefused`: there are too few.

        Returns a memory cgroup for each of these processes, or none where sessions have none.
        """
        answer = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self.link.send(Message({"branches": count, "processes": processes}))
        given = await answer
        if not given["granted"]:
            refused = CapacityReached(given["taken"], given["most"])
            text = f"{count} branches do not fit here: {refused}"
            raise BranchRefused(text, refused.code, **refused.details)
        if (group := given["group"]) is None:
            if self._cap_bytes and not self._is_watching:
                self._is_watching = True
                self._begin(self._watch_memory(self._cap_bytes))
            return []
        path, _, first = group["directory"].rpartition("-")
        numbers = range(int(first), int(first) + processes)
        return [Cgroup(f"{path}-{number}", "", group["version"]) for number in numbers]

    async def _watch_memory(self, cap_bytes: int) -> None:
        """Kill session processes that are over the cap and have no cgroup."""
        while True:
            await asyncio.sleep(MEMORY_CHECK_SECONDS)
            envs = [each.env for each in self.table if isinstance(each.env, RemoteEnvironment)]
            for env in envs:
                if (rollup_bytes(env.process.pid, "Pss") or 0) > cap_bytes:
                    env.process.killed_for = cap_sentence(cap_bytes)
                    env.kill()

    def free_slot(self) -> None:
        """Give back the slot of a session that has ended while others continue."""
        self.link.send(Message({"branches": -1, "processes": 0}))

    def own_fds(self) -> set[int]:
        """Return the descriptors that the environment has not opened."""
        transports: list[Any] = [each.transport for each in self.server.server_state.connections]
        sockets = [each.get_extra_info("socket") for each in transports]
        return {*self._base_fds, *(each.fileno() for each in sockets if each is not None)}

    def _on_link(self, message: Message) -> None:
        """Take over a connection for the session that the front-end shard has accepted."""
        if "granted" in message.head:
            if not (answer := self._asking.popleft()).done():
                answer.set_result(message.head)
        elif message.fds:
            accepted = message.head.get("accepted")
            self._take_connection(message.fds[0], message.head["since"], message.body, accepted)
