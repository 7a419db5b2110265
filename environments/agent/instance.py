# SPDX-License-Identifier: Apache-2.0
"""The instance of one replica on its engine, and the server in it.

`ReplicaInstance` finds, follows and ends the instance. It asks the engine only when something may
have changed: the engine's list shows another state (`observe`), or something was done to the
instance. Its log is followed as soon as it runs.

`ReplicaServer` asks the server over HTTP whether it is ready, and how full it is. A server that is
not ours reports no capacity, and is not asked for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

from ...schema.errors import NotAnswering
from ...schema.protocol import LOOPBACK, Serving
from ...schema.replica import ServerInfo
from ...system.net.access import bearer_header, with_token, without_token
from ...system.net.listening_sockets import http_address
from ...system.process.process_identity import boot_seconds
from ...system.text.json_lines import Json
from ..access import MAX_ANSWER_BYTES, read_answer
from ..engines.base import EngineRefused, ExitFacts, Instance, InstanceState, ReplicaPlan
from ..engines.instance_logs import LogPump
from ..replica_state import Life
from ..run_files import RunFile
from .engine_watch import EngineWatch
from .replica_status import EngineReplicaStatus

ID_LENGTH = 40  # of an instance's id in messages: engines' own commands take a part of it
LAST_LINES_SECONDS = 5.0  # for the rest of a log, once its instance has exited
TIMEOUT_SECONDS = 2.0  # for a server to answer
SILENT_TIMEOUT_SECONDS = 5.0  # for the server of a silent instance to answer
# A silent instance has ended when as many requests to its server have failed, over as many seconds.
SILENT_QUESTIONS = 3
SILENT_ASKED_SECONDS = 8.0


class ReplicaInstance:
    """The instance of one replica, as it was last seen (`known`; None: there is none).

    Owned by the task of the replica.
    """

    def __init__(self, run_file: RunFile, watch: EngineWatch) -> None:
        self.known: Instance | None = None
        self._run_file = run_file
        self._watch = watch
        self._engine = watch.engine
        self._is_seen = False  # whether `known` is as the engine has it
        self._pump: LogPump | None = None
        self._has_signalled = False

    def observe(self, instance: Instance | None) -> bool:
        """Record what a list shows; return whether the engine must be asked about the instance."""
        is_new = _seen(instance) != _seen(self.known)
        self._is_seen = self._is_seen and not is_new
        return is_new

    def doubt(self) -> None:
        """Make the next `find` ask the engine."""
        self._is_seen = False

    def close(self) -> None:
        """Stop following its log."""
        if self._pump is not None:
            self._pump.stop()

    async def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the instance, asked for only when something has changed."""
        if self._is_seen:
            return self.known
        self._is_seen = True  # before the question: a change during it makes another one due
        try:
            instance = await self._watch.call(self._engine.find, plan)
        except Exception:  # it is unknown whether there is one
            self._is_seen = False
            raise
        if instance is None:
            self.known = None
            return None
        return self._attach(instance)

    async def start(self, plan: ReplicaPlan) -> Instance:
        """Start the instance on the engine, or attach to the one that has its name; return it."""
        return self._attach(await self._watch.call(self._engine.start, plan))

    def _attach(self, instance: Instance) -> Instance:
        before, self.known = self.known, instance
        if before is None or before.id != instance.id:
            self._pump = None
        if self._pump is None and instance.state is not InstanceState.STARTING:
            self._pump = LogPump(
                self._engine,
                instance,
                run_dir=self._run_file.run_dir,
                log_path=self._run_file.log_path,
                max_bytes=self._run_file.data["max_log_bytes"],
            )
        return instance

    async def signal(self, instance: Instance, number: int) -> None:
        """Send the instance a signal, once, also if the engine refuses it."""
        if not self._has_signalled:
            with contextlib.suppress(EngineRefused):
                await self._watch.call(self._engine.signal, instance, number)
            self._has_signalled = True

    async def end(self, instance: Instance, life: Callable[[], Life], due: asyncio.Event) -> None:
        """Stop an instance, and again each time the deadline of its `life` is moved forward.

        `due` is set when the deadline may have changed.
        """
        stops: list[asyncio.Task[None]] = []
        nearest = math.inf
        while not any(stop.done() for stop in stops):
            due.clear()
            deadline = life().deadline or 0.0
            if deadline < nearest:
                nearest, left = deadline, life().seconds_left(boot_seconds())
                stopping = self._watch.call_long(self._engine.stop, instance, left)
                stops.append(asyncio.create_task(stopping))
                stops[-1].add_done_callback(lambda stop: _note_stop(stop, due))
            await due.wait()
        for stop in stops:
            if stop.done():
                stop.result()
        self._is_seen = False

    async def remove(self, instance: Instance) -> None:
        """Remove the instance from its engine."""
        await self._watch.call(self._engine.remove, instance)
        self._is_seen = False

    async def finish_log(self) -> None:
        """Wait for the rest of the log."""
        if self._pump is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pump.ended.wait(), LAST_LINES_SECONDS)
            self._pump.stop()


class ReplicaServer:
    """The server of one replica; the replica's status has the address where it last answered.

    `has_capacity`: whether it can say how full it is, as far as is known.
    """

    def __init__(self, run_file: RunFile, status: EngineReplicaStatus) -> None:
        self.has_capacity = True
        self._run_file = run_file
        self._status = status
        self._unanswered: list[float] = []  # when a silent instance's server did not answer

    @property
    def is_answering(self) -> bool:
        """Return whether it answered the last question, if it was asked one."""
        return not self._unanswered

    @property
    def address(self) -> str:
        """Return where it last answered, which is not the gateway's address."""
        return http_address(self._status.host or "", self._status.port or 0)

    async def why_not_ready(
        self, plan: ReplicaPlan, instance: Instance, seconds: float = TIMEOUT_SECONDS
    ) -> str | None:
        """Return why the server is not ready, or None; record which of its addresses answers."""
        usual = http_address(plan.host, plan.port)
        if self._run_file.is_elsewhere and instance.address:
            usual = instance.address

        async def why_not(address: str) -> str | None:
            url = with_token(address, self._run_file.token)
            return await why_not_healthy(url, seconds)

        own = instance.address or usual
        address, why = await where_it_answers(own, usual, why_not)
        if why is None:
            parts = urlsplit(address)
            self._status.host, self._status.port = parts.hostname, parts.port
        return why

    async def is_lost(self, plan: ReplicaPlan, instance: Instance) -> bool:
        """Return whether its instance has been silent for long, and it does not answer either."""
        why = None
        if instance.is_silent:
            why = await self.why_not_ready(plan, instance, SILENT_TIMEOUT_SECONDS)
        if why is None:
            self._unanswered.clear()
            return False
        self._unanswered.append(time.monotonic())
        seconds = self._unanswered[-1] - self._unanswered[0]
        return len(self._unanswered) >= SILENT_QUESTIONS and seconds >= SILENT_ASKED_SECONDS

    async def read_capacity(self) -> Json | None:
        """Return how full the server is; None: it does not answer now, or cannot say."""
        if not self.has_capacity:
            return None
        try:
            found = await read_capacity(with_token(self.address, self._run_file.token))
        except NotAnswering:
            return None
        self.has_capacity = found is not None and "serving" not in found
        return found


def _note_stop(stop: asyncio.Task[None], due: asyncio.Event) -> None:
    if not stop.cancelled():
        stop.exception()  # retrieved, since only one of several stops is awaited
    due.set()


def exit_facts(instance: Instance | None, known_id: str | None, engine: str) -> ExitFacts | None:
    """Return how an instance ended, as far as is known; `known_id` is the engine's id of it."""
    if instance is None:
        if known_id is None:
            return None
        what = f"{engine} does not have {known_id[:ID_LENGTH]} any more"
        return ExitFacts(ended_by=f"{what}: it was removed, and not by openenvd")
    return ExitFacts(ended_by=instance.waiting) if instance.is_silent else instance.exit


def _seen(instance: Instance | None) -> tuple[object, ...] | None:
    """Return those facts of an instance whose change makes another question due."""
    if instance is None:
        return None
    facts = instance.is_on_its_way, instance.waiting, instance.ends_at
    return instance.id, instance.state, *facts


async def why_not_healthy(base_url: str, seconds: float = TIMEOUT_SECONDS) -> str | None:
    """Return why a server is not ready, according to `/health`; None: it is ready."""
    try:
        await _get(base_url, "/health", seconds)
    except NotAnswering as exc:
        return exc.message
    return None


async def where_it_answers(
    own: str, usual: str, why_not: Callable[[str], Awaitable[str | None]]
) -> tuple[str, str | None]:
    """Return the address at which a server answers, and None; or an address and why it does not.

    Its own address is asked again when only the usual one has answered: the server may have begun
    to listen in between, and sessions at the usual address may end with the engine.
    """
    why = await why_not(own)
    if why is None or own == usual:
        return own, why
    why = await why_not(usual)
    if why is None and await why_not(own) is None:
        return own, None
    return usual, why


async def read_capacity(base_url: str) -> Json | None:
    """Return the answer of `/capacity`, if there is such a route; raises `NotAnswering`."""
    try:
        found = await _get(base_url, "/capacity", TIMEOUT_SECONDS)
    except NotAnswering as exc:
        if exc.may_pass:
            raise
        return None
    return found if isinstance(found, dict) and "sessions" in found else None


async def _get(base_url: str, path: str, seconds: float) -> Any:
    """Return a server's JSON, as `ask` does, without a thread, as a server may take all `seconds`.

    In HTTP/1.0 an answer has no chunks, and ends with its connection.
    """
    address, token = without_token(base_url)
    parts = urlsplit(address)
    headers = {"Host": LOOPBACK, **bearer_header(token)}
    lines = [f"GET {parts.path.rstrip('/')}{path} HTTP/1.0", *map(": ".join, headers.items())]
    answer = b""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with contextlib.closing(writer):
                writer.write("\r\n".join([*lines, "", ""]).encode())
                while (part := await reader.read(2**16)) and len(answer) < MAX_ANSWER_BYTES:
                    answer += part
    except (OSError, TimeoutError) as exc:
        why = str(exc) or "timed out"
        raise NotAnswering(f"nothing answers at {address}{path}: {why}") from exc
    head, _, body = answer.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.\d (\d{3}) ?([^\r\n]*)", head)
    if found is None:
        raise NotAnswering(f"nothing answers at {address}{path}: it is no HTTP server")
    return read_answer(f"{address}{path}", int(found[1]), found[2].decode("latin-1"), body)


def ready_info(capacity: Json | None) -> ServerInfo:
    """Return the `info` of a status: what a server reports about itself when it is ready."""
    if capacity is None or "serving" in capacity:  # it has no sessions of ours
        own = cast("ServerInfo", capacity or {"serving": Serving.AS_IS, "notes": []})
        return {"ready": True, "max_sessions": None, **own}
    return {
        "ready": True,
        "max_sessions": capacity.get("max_sessions"),
        "serving": Serving.SESSIONS,
        "shards": len(capacity["shards"]),
        "isolate": bool(capacity.get("isolated")),
        "notes": [],
    }
