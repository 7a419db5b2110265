# SPDX-License-Identifier: Apache-2.0
"""A shard: one process with one event loop that serves sessions.

    inbox ─▶ Arrival ─▶ `_route` ─┬─ wants a session ─▶ Admission ─its turn─▶ server
                                  ├─ anything else ────────────────────────▶ server
                                  └─▶ inbox of another shard: that with its session, with room,
                                      or with the project's own routes (`serving/own_app.py`)
    supervisor ◀── link: ready, which sockets have sessions (`ConnectionRegistry`), session
                   processes (`sessions/remote_session.py`)

The supervisor and other shards send connections to the inbox. `serving/` answers them: this room
decides which ones its server gets. The link ends when the supervisor exits: then this process exits
at once.

A shard without sessions and connections is idle: it has no timer, and writes no heartbeats but that
it is idle.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ...system.memory.cgroups import own_group
from ...system.net.connection_limit import closing_answer
from ...system.net.websocket import GOING_AWAY_CLOSE
from ...system.process.descriptors import Message
from ...system.process.loop_lag import EventLoopLagMonitor
from ...system.process.signal_pipe import STOP_SIGNALS, handler_before, take_over
from ...system.text.units import MB, plural
from ..errors import SessionEnded
from ..ipc.fd_messages import MessageChannel, PeerReplicas, Unanswered, connections_in
from ..ipc.reports import note_awake
from ..ipc.scoreboard import MICROSECONDS, Counters, Field, Scoreboard, now_microseconds
from ..serving.app import HostApp
from ..serving.mcp import Peers
from ..serving.own_app import check_handshake
from ..serving.uvicorn_server import Server
from ..sessions.remote_session import ProcessEnds
from ..sessions.table import SessionTable
from ..startup import HOME, STOPPING, ChildConfig, sessions_of_process, write_stacks_at_signal
from ..websocket.handshake import END_OF_HEAD, may_ask_another, try_another
from . import connections
from .admission import Admission

if TYPE_CHECKING:
    from ...schema.protocol import HostConfig
    from ..environment.definition import Definition
    from ..shared_state.frames import WorldLost

HEARTBEAT_SECONDS = 0.1
STOP_SECONDS = 3.0  # for sessions to close their environments
LAST_FRAME_ITERATIONS = 10
SHORT_SHARE = 0.8  # of the memory limit: with less free, a time-out may be due to a lack of memory
_DRAINING = "This replica is being drained: it accepts no new sessions."
_FAILED = closing_answer(HTTPStatus.INTERNAL_SERVER_ERROR)

log = logging.getLogger("openenvd.env_host")


@dataclass(eq=False, slots=True)
class ProcessReport:
    """Reports the state of a process to the supervisor, and to clients whose calls time out.

    `owns_cgroup`: the cgroup is the replica's own.
    """

    _table: SessionTable
    _scoreboard: Scoreboard
    _counters: Counters
    _link: MessageChannel
    _lag: EventLoopLagMonitor
    _owns_cgroup: bool
    _failure: str | None = None  # as sent last

    def write_counts(self) -> None:
        """Write the counters that change all the time."""
        counters, table = self._counters, self._table
        counters[Field.HEARTBEAT] = now_microseconds()
        counters[Field.BUSY] = sum(session.busy for session in table)
        counters[Field.BEGUN] = table.begun
        counters[Field.BRANCHES] = table.branches.live
        counters[Field.CHECKPOINTS] = len(table.branches.checkpoints)
        counters[Field.ISOLATED] = sum(session.is_remote for session in table)
        counters[Field.STEPS] = table.steps
        counters[Field.STEP_TIMEOUTS] = table.step_timeouts
        lag = self._lag.snapshot()
        counters[Field.LAG_P50] = int(lag.p50_seconds * MICROSECONDS)
        counters[Field.LAG_P99] = int(lag.p99_seconds * MICROSECONDS)
        counters[Field.LAG_MAX] = int(lag.max_seconds * MICROSECONDS)

    def write_abandoned(self, count: int, since: float) -> None:
        """Write how many calls still run whose sessions have ended, and when the oldest began."""
        seconds = asyncio.get_running_loop().time() - since
        self._counters[Field.ABANDONED_SINCE] = now_microseconds() - int(seconds * MICROSECONDS)
        self._counters[Field.ABANDONED] = count

    def send_failure(self) -> None:
        """Send the supervisor whether environments can be created, when that has changed."""
        if (failure := self._table.failure) != self._failure:
            self._failure = failure
            self._link.send(Message({"sessions_fail": failure or None}))

    def memory_note(self, began: float) -> str:
        """Return sentences about memory for a call that has timed out; empty: it was not short."""
        since = time.time() - (asyncio.get_running_loop().time() - began)
        exits, *_ = self._scoreboard.read_news()
        killed = sum(one.get("programs", 0) for one in exits if one["at"] >= since)
        group = own_group(is_ours=not self._owns_cgroup)
        held, limit = (0, 0) if group is None else (group.held_bytes(), group.limit_bytes())
        return memory_sentences(killed, held or 0, limit or 0)


def memory_sentences(killed: int, held_bytes: int, limit_bytes: int) -> str:
    """Return sentences for the client of a call that has timed out; empty: memory was not short.

    `killed` programs of the environment were killed for memory during the call. All processes of
    the replica hold `held_bytes`; they may `limit_bytes` (0: any).
    """
    text = ""
    if killed:
        programs = plural(killed, "program")
        text = f" Killed for memory meanwhile: {programs} that the environment had started."
    if limit_bytes and held_bytes >= SHORT_SHARE * limit_bytes:
        text += (
            f" Memory was short: {held_bytes / MB:.0f} MB were held together with other processes "
            f"of the replica, of {limit_bytes / MB:.0f} MB."
        )
    return text


class Shard:
    """A process that takes connections from the supervisor. Needs a running event loop."""

    def __init__(
        self,
        config: HostConfig,
        definition: Definition,
        own: ChildConfig,
        scoreboard: Scoreboard,
    ) -> None:
        self._own = own
        self._scoreboard = scoreboard
        self._counters = scoreboard[own.index]
        self._link_end = socket.socket(fileno=own.link_fd)
        self.link = MessageChannel(
            self._link_end, on_message=self._on_link, on_end=lambda: os._exit(1)
        )
        self.arrivals = connections.Arrivals(
            self._counters, self._route, lambda arrival: self.admission.forget(arrival)
        )
        owner = connections.Owner(own.index, own.generation, config.replica)
        self.others = connections.OtherProcesses(
            scoreboard,
            owner,
            PeerReplicas(config.doors, config.replica),
            [MessageChannel(socket.socket(fileno=fd)) for fd in own.inbox_fds],
            shares_address=config.shares_address,
        )
        self.admission = Admission(
            scoreboard,
            own.index,
            timeout_seconds=config.admission_timeout_seconds,
            serve=self._serve,
            hand_over=self.others.hand_over,
            ask_peer=self.others.ask_replica,
        )
        self.registry = connections.ConnectionRegistry(self.link, owner, self._count)
        self.process_ends = (
            ProcessEnds(self.link, own.index, own.shards, has_template=own.has_template)
            if own.isolates
            else None
        )
        self.table = SessionTable(
            definition,
            own.max_sessions,
            exclusive=own.exclusive,
            registry=self.registry,
            admission=self.admission,
            step_timeout_seconds=config.step_timeout_seconds,
            process_ends=self.process_ends,
            idle_seconds=definition.session_timeout_seconds or math.inf,
            unattached_seconds=config.http_session_idle_seconds or math.inf,
            reset_first=config.refuses_unreset,
        )
        self._lag = EventLoopLagMonitor(f"shard {own.index}")  # paused while all is idle
        self._report = ProcessReport(
            self.table, scoreboard, self._counters, self.link, self._lag, config.owns_cgroup
        )
        self.table.abandoned.on_change = self._report.write_abandoned
        self.table.memory_note = self._report.memory_note
        self.table.count_limited = lambda change: self._counters.add(Field.LIMITED, change)
        route = lambda *read: self._take_connection(Unanswered(now_microseconds(), *read))  # noqa: E731
        peers = Peers(
            owner_of=self.others.owner_of,
            roomier=self.others.roomier,
            token=(config.token or "").encode(),
        )
        app = HostApp(definition, self.table, config, scoreboard, peers, own, route)
        self.server = Server(app, config, runs_hooks=own.is_home)
        self._stopping = asyncio.Event()
        self._stopped_by: signal.Signals | None = None
        self._refuses_unknown_ids = definition.refuses_unknown_ids
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_connections = sessions_of_process(limit // (1 + own.isolates))
        self._pending: set[asyncio.Task[None]] = set()
        self._checking: set[connections.Arrival] = set()  # asking the project's middleware

    async def run(self) -> None:
        """Serve until asked to stop."""
        loop = asyncio.get_running_loop()
        take_over(STOP_SIGNALS, lambda n: loop.add_signal_handler(n, self._on_signal, n))
        write_stacks_at_signal()
        await self.server.start()
        counters, own = self._counters, self._own
        counters[Field.PID] = os.getpid()
        counters[Field.GENERATION] = own.generation
        counters[Field.MAX_SESSIONS] = own.max_sessions
        self.wake()
        counters[Field.READY] = 1
        self._lag.start(paused=bool(counters[Field.IDLE]))
        inbox = MessageChannel(
            socket.socket(fileno=own.inbox_fd), on_message=self._take_connections
        )
        self.link.send(Message({"ready": True}))
        await self._stopping.wait()
        inbox.close()
        await self._stop()
        self._lag.stop()

    async def _stop(self) -> None:
        """End the sessions with the reason, and finish the HTTP requests under way."""
        was_asked = self._counters[Field.STOPPING] or self._counters[Field.CORDONED]
        foreign = None if was_asked else self._stopped_by  # the supervisor has not sent it
        self._counters[Field.STOPPING] = 1
        self._counters[Field.ENDED] = self._counters[Field.SESSIONS]
        self.admission.stop()
        text = STOPPING
        if foreign is not None:
            text = f"The process of this session was stopped by {foreign.name}."
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.table.stop(SessionEnded(text, GOING_AWAY_CLOSE))
        except TimeoutError:
            fields = {"shard": self._own.index, "generation": self._own.generation}
            text = "some environments did not close within %g s"
            log.warning(text, STOP_SECONDS, extra=fields)
        for _ in range(LAST_FRAME_ITERATIONS):  # a session frees its slot before its last frame
            await asyncio.sleep(0)
        await self.server.stop()
        self._report.send_failure()
        self.registry.flush()
        self.link.close()
        if self._stopped_by is not None:
            _pass_on(self._stopped_by)
        if foreign is not None:  # so that the supervisor reports this exit
            signal.signal(foreign, signal.SIG_DFL)
            signal.raise_signal(foreign)

    def _on_signal(self, number: signal.Signals) -> None:
        self._stopped_by = number
        self._stopping.set()

    def on_state_lost(self, lost: WorldLost) -> None:
        """End all sessions: the state that they share is gone."""
        for session in self.table:
            if session.socket is not None:
                session.socket.end(lost)
            else:
                self._begin(self.table.close(session))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._pending.add(task := asyncio.create_task(work))
        task.add_done_callback(self._pending.discard)

    def wake(self) -> None:
        """Begin to report, until there is nothing to do."""
        if self._counters[Field.IDLE] or not self._counters[Field.HEARTBEAT]:
            note_awake(self._counters, now_microseconds())
            self._lag.resume()
            self._beat()

    def _beat(self) -> None:
        """Write the counters that change all the time, as long as there is anything to do."""
        counters = self._counters
        self._read_quota()
        self._report.write_counts()
        self._report.send_failure()
        if counters[Field.DRAINING]:
            self.server.close_after_answers()
        self._count_connections()
        self.arrivals.make_room(counters[Field.OPEN] - self._most_connections)
        if counters[Field.OPEN] or counters.load or counters[Field.WAITING]:
            asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)
        else:
            counters[Field.IDLE] = 1
            self._lag.pause()

    def _read_quota(self) -> None:
        """Read how many sessions this process may have: the supervisor may change its quota."""
        if not self._own.exclusive:
            self.table.max_sessions = self._counters[Field.MAX_SESSIONS]

    def _count_connections(self) -> None:
        unanswered = len(self.arrivals) + len(self._checking) + len(self.admission)
        self._counters[Field.OPEN] = len(self.server.server_state.connections) + unanswered

    def _count(self) -> None:
        """Record that the number of sessions has changed, or a slot is free."""
        self._counters[Field.SESSIONS] = self.table.taken
        self._counters[Field.HEARTBEAT] = now_microseconds()
        self.wake()
        self.admission.changed()

    def _take_connections(self, message: Message) -> None:
        """Take connections from the supervisor, or one from another shard."""
        for connection in connections_in(message):
            self._take_connection(connection)
        if placed := message.head.get("placed", 0):  # last, when they are counted as arriving
            self._counters.add(Field.CONNECTIONS, placed)

    def _take_connection(self, connection: Unanswered) -> None:
        """Open a connection; make room for it if there are too many that are silent."""
        self._read_quota()
        self._count_connections()
        self._counters.add(Field.OPEN)
        self.arrivals.make_room(self._counters[Field.OPEN] - self._most_connections)
        self.arrivals.open(connection)
        self.wake()  # last: before there is a connection, it would become idle again

    def _route(self, arrival: connections.Arrival) -> None:
        head = connections.read_head(arrival.data)
        definition = self.table.definition
        is_session = head.is_upgrade and head.path not in definition.own_paths
        is_unchecked = definition.checks_handshakes and arrival.accepted is None
        is_homes = is_unchecked if is_session else definition.is_own(head.path)
        if is_homes and not self._own.is_home and not arrival.is_internal:
            self.others.hand_over(arrival, HOME)
        elif is_homes and is_session and self._own.is_home:
            self._begin(self._check(arrival, head))
        else:
            self._route_on(arrival, head, is_session=is_session)

    async def _check(self, arrival: connections.Arrival, head: connections.Head) -> None:
        """Route the connection of a session once the project's middleware has accepted it."""
        beginning, end, _ = arrival.data.partition(END_OF_HEAD)
        if (upgrade := self.server.permitted(beginning + end)) is None:
            self._serve(arrival)
            return
        if self._counters[Field.OPEN] > self._most_connections:
            arrival.refuse(try_another())
            return
        self._checking.add(arrival)
        try:
            answer = await check_handshake(self.table.definition.app, upgrade, arrival.transport)
        except Exception:
            log.exception("the middleware of this project gave no answer to a handshake")
            answer = _FAILED
        finally:
            self._checking.discard(arrival)
        if arrival.transport.is_closing():
            return
        if isinstance(answer, bytes):
            arrival.refuse(answer)
        else:
            arrival.accepted = answer
            self._route_on(arrival, head, is_session=True)

    def _route_on(
        self, arrival: connections.Arrival, head: connections.Head, *, is_session: bool
    ) -> None:
        index = self.others.process(head.session_id) if head.session_id else None
        begins_session = head.wants_session  # needs a slot; so does an unknown session
        if not self._refuses_unknown_ids and head.is_upgrade and head.session_id:
            begins_session = head.session_id not in self.table
        if index is not None:
            self.others.hand_over(arrival, index)
        elif head.session_id and (number := self.others.replica(head.session_id)) is not None:
            self.others.pass_on(arrival, number)
        elif is_session and begins_session and self.server.permitted(arrival.data):
            if 0 < self._counters[Field.DRAINING] < arrival.since:
                if not self.others.ask_replica(arrival):
                    arrival.refuse(try_another(_DRAINING))
            elif self.admission.is_full and may_ask_another(arrival.data):
                arrival.refuse(try_another())
            elif self._counters[Field.OPEN] > self._most_connections:
                arrival.refuse(try_another())  # the descriptors that are left are for HTTP
            else:
                self.admission.consider(arrival)
        else:
            self._serve(arrival)

    def _serve(self, arrival: connections.Arrival) -> None:
        arrival.serve_by(self.server.serve_connection)

    def _on_link(self, message: Message) -> None:
        """Handle a message from the supervisor, which is about a session process."""
        assert self.process_ends is not None
        self.process_ends.take(message.head)


def _pass_on(number: signal.Signals) -> None:
    """Call the environment's own handler, if any; what it raises has no effect any more."""
    handler = handler_before(number)
    if callable(handler) and handler is not signal.default_int_handler:
        try:
            handler(number, None)
        except BaseException as exc:
            log.info("the environment's handler of %s raised %r", number.name, exc)
