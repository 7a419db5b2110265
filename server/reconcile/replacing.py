# SPDX-License-Identifier: Apache-2.0
"""`Change`: starts, keeps and drains the replicas of one environment, for one request.

    a replica has changed ──▶ its part (`watches.Roster`) ──▶ `replacement_step` ──▶ start | drain
                                  └─ it has failed: the request fails, and `_undo` stops what it
                                     has started and not kept

`changes.py` has the change that each operation makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, TypeVar

from ...environments.engines import started_replicas
from ...environments.engines.providers import Provider, provider_named
from ...environments.engines.started_replicas import ALIVE, READY, StartedReplica
from ...environments.replica_policy import replacement_step, share_sessions
from ...environments.run_files import RunFile
from ...environments.shim.client import read_status_file
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment
from ...requests_db.sql import queries
from ...schema.errors import NotReady, NotRunning
from ...system.files.log_files import last_lines
from ...system.text.safe_text import without_secrets
from ...system.text.units import plural
from ..dispatch.running import STOPPING
from ..operations.base import OperationContext, ReplicasAwaited, SessionsLeft
from .gateway import GatewayManager
from .replica_watch import ReplicaWatch, is_over
from .replicas import ReplicaManager, is_leaving
from .watches import Moves, Part, Roster

READY_SECONDS = 600.0
ACCEPT_SECONDS = 30.0  # for new replicas to accept connections, before the old ones end
STOP_SECONDS = 15.0  # for a replica that has not ended by itself in its time
PATIENT_SECONDS = 10.0  # without another ready replica, after which the reason is logged
POLL_INTERVAL_SECONDS = 1.0  # while no replica changes: a time limit may be over
_THREADS = ThreadPoolExecutor(32, "provider")  # an engine that hangs blocks only its own requests
Result = TypeVar("Result")


@dataclass(eq=False)
class Change:
    """One request, and the environment that it changes."""

    is_whole: ClassVar[bool] = False  # whether new replicas serve only when all are ready
    # The parts whose replicas may be the model of new ones.
    models: ClassVar[Sequence[Part]] = (Part.STAYS, Part.OLD, Part.KEPT, Part.READY, Part.WAITING)

    name: str
    _context: OperationContext
    _store: AsyncStore
    _replicas: ReplicaManager
    _gateway: GatewayManager
    _moves: Moves
    _launch: str | None = None  # that serves
    _ready: dict[str, StartedReplica] = field(default_factory=dict)  # of those started, by id
    _drained: dict[str, ReplicaWatch] = field(default_factory=dict)
    _keeps_one: bool = False  # the last replica stays: new ones get its sockets
    _wanted: int = 0
    _shares: deque[int | None] = field(default_factory=deque)  # of those that may still be started
    _left: SessionsLeft | None = None
    _ended_by: float = 0.0  # monotonic: when the replicas drained last should have ended

    def __post_init__(self) -> None:
        self._roster = Roster(self._part_of)
        self._note_start(READY_SECONDS, 0)

    async def _begin(self, reason: str | None) -> Environment:
        environment = await self._store.read(queries.environment(self.name))
        if environment is not None:
            self._launch = environment.request_id
            await self._look(self._launch)
            if staying := self._staying():
                if reason is not None:
                    self._context.say(f"{self.name}: {reason}")
                self._keeps_one = staying[0].run_file.is_local
                return environment
        raise NotRunning(f"{self.name} has no replicas", "launch it again")

    async def _look(self, launch: str | None) -> None:
        """Find the replicas of a launch; stop those of an earlier attempt that are not ready."""
        await self._replicas.adopt(self.name, launch)
        await self._replicas.drop([w for w in self._joining() if not is_ready(w)])
        for watch in self._staying():
            self._roster.note(watch)

    def _staying(self) -> list[ReplicaWatch]:
        return self._replicas.staying(self.name, self._launch)

    def _joining(self) -> list[ReplicaWatch]:
        """The new replicas that are not kept yet."""
        watched = self._replicas.watches.of(self.name)
        return [each for each in watched if self._is_new(each) and not each.is_kept.is_set()]

    def _is_new(self, watch: ReplicaWatch) -> bool:
        data = watch.run_file.data
        return data.get("started_by", watch.request_id) == self._context.request_id

    def _is_chosen(self, watch: ReplicaWatch) -> bool:
        """Return whether a replica has to be replaced."""
        return False

    def _part_of(self, watch: ReplicaWatch) -> Part | None:
        """The part of a replica in this change; raises the reason if one has failed to start."""
        is_over_now, status = is_over(watch.replica.state), watch.status
        if watch.replica.id in self._drained:
            if self._left is not None:
                self._left.note(watch.replica.id, 0 if is_over_now else watch.sessions)
            return None if is_over_now else Part.ENDING
        if not self._is_new(watch):
            if is_leaving(watch):
                return None
            return Part.OLD if self._is_chosen(watch) else Part.STAYS
        is_kept = watch.is_kept.is_set()
        if not is_kept and (watch.has_failed or is_over_now):
            if status.get("state", "starting") in ALIVE:
                raise started_replicas.shim_lost(watch.run_file)
            started_replicas.raise_if_ended(watch.run_file, status)
        if not is_kept and status.get("state") not in READY:
            return Part.WAITING
        if watch.replica.id not in self._ready:
            self._ready[watch.replica.id] = started_replicas.started_replica(watch.run_file, status)
            self._awaited.on_ready(self._ready[watch.replica.id])
            self._waits_since = time.monotonic()
        return Part.KEPT if is_kept else Part.READY

    @property
    def _started(self) -> list[StartedReplica]:
        return sorted(self._ready.values(), key=lambda replica: replica.ordinal)

    async def _start(self, count: int) -> None:
        """Start replicas that are like an existing one."""
        like = next(self._roster.each(*self.models)).run_file
        shares = [self._shares.popleft() for _ in range(min(count, len(self._shares)))]
        await self._add(like, shares, self._wanted)

    async def _add(self, like: RunFile, shares: Sequence[int | None], wanted: int) -> None:
        """Start a replica for each share of the sessions."""
        seconds = like.data["spec"].get("ready_timeout_seconds") or READY_SECONDS
        self._note_start(seconds, len(shares))
        self._awaited.report(f"{plural(len(shares), 'replica')} starting")
        watched = {each.replica.id: each.run_file for each in self._replicas.watches.of(self.name)}
        by = self._context.request_id
        started = await self._call(
            like.provider,
            lambda it: it.add(like, shares, replicas=wanted, started_by=by, watched=watched),
        )
        for each in started:
            self._context.say(f"replica {each.ordinal} is starting")
        await self._take_moves(0.0)  # only now: a start is reported before its replica is ready

    async def _call(
        self, provider: str, work: Callable[[Provider], list[RunFile]]
    ) -> list[RunFile]:
        """Start replicas by a provider; returns, even if cancelled, once the provider is done."""
        home, fork = self._context.home, self._replicas.fork
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(_THREADS, lambda: work(provider_named(provider, home, fork)))
        try:
            return await until_done(thread)
        finally:  # also if cancelled
            if thread.exception() is None:
                await self._replicas.adopt_started(thread.result())

    def _note_start(self, ready_seconds: float, count: int) -> None:
        self._awaited = ReplicasAwaited(self._context, count)
        self._ready_seconds = ready_seconds
        self._waits_since = time.monotonic()
        self._deadline = self._waits_since + ready_seconds

    def _divide(self, spec: dict[str, Any], wanted: int, others: Iterable[ReplicaWatch]) -> None:
        """Divide the sessions among `wanted` replicas; new ones get what `others` do not have."""
        self._wanted = wanted
        free = Counter(shares_of(spec, wanted))
        free.subtract(Counter(watch.run_file.max_sessions for watch in others))
        self._shares = deque((+free).elements())

    async def _take_moves(self, seconds: float) -> list[ReplicaWatch]:
        changed = await self._moves.next(seconds)
        for watch in changed:
            self._roster.note(watch)
        return changed

    async def _wait(self) -> None:
        """Wait until a replica changes, or a time may be over.

        Raises:
            EnvironmentsError: One that was started has failed, or one was not ready in time.
            NotReady: One that is drained has not ended in time.
        """
        await self._take_moves(POLL_INTERVAL_SECONDS)
        if (waiting := next(self._roster.each(Part.WAITING), None)) is not None:
            self._report_waiting(waiting)
        ending = next(self._roster.each(Part.ENDING), None)
        if ending is not None and time.monotonic() >= self._ended_by:
            raise NotReady(
                f"{ending.replica.id} has not ended yet: its engine does not answer, or is slow",
                "it ends when its engine has stopped it; restart the others then",
            )

    def _report_waiting(self, first: ReplicaWatch) -> None:
        now, count, ready = time.monotonic(), self._roster.count(Part.WAITING), len(self._ready)
        why = first.status.get("problem") or first.status.get("waiting")
        if now >= self._deadline:
            raise started_replicas.not_ready(first.run_file, self._ready_seconds, why)
        if why is not None and now - self._waits_since >= PATIENT_SECONDS:
            counts = f"{ready} of {ready + count} are ready; {count} waiting"
            self._awaited.on_lasting(f"{counts}: {why}", self._deadline - now)
        elif why is None:
            run_file = first.run_file
            secrets = {"env": run_file.data["env"], "token": run_file.token}
            [line] = last_lines(run_file.log_path, 1) or [""]
            self._awaited.on_line(without_secrets(line, secrets))

    async def _replace(self, size: int, most: int, room: tuple[int, int], seconds: float) -> None:
        """Replace replicas until nothing is left to do.

        Args:
            size: How many replicas there should be meanwhile.
            most: How many may be started.
            room: How many there may be beyond `size`, and how many may be missing of it.
            seconds: For the sessions of those that are drained.
        """
        count = self._roster.count
        while True:
            new, kept = count(Part.WAITING, Part.READY, Part.KEPT), count(Part.KEPT)
            staying, old, ending = count(Part.STAYS), count(Part.OLD), count(Part.ENDING)
            start, drain = replacement_step(
                size, room, staying=staying, old=old, new=new, ready=kept, ending=ending
            )
            start, drain = min(start, most - new), min(drain, staying + old + new - self._keeps_one)
            if start > 0:
                await self._start(start)
            elif self._has_ended(most - new):
                return
            elif count(Part.READY) and not (self.is_whole and count(Part.WAITING)):
                await self._keep()
            elif drain > 0:
                batch = list(islice(self._roster.each(Part.OLD), drain))
                sessions = {watch.replica.id: watch.sessions for watch in batch}
                self._left = SessionsLeft(self._context, sessions, seconds)
                self._ended_by = time.monotonic() + seconds + STOP_SECONDS
                await self._drain(batch, seconds)
            else:
                await self._wait()

    def _has_ended(self, missing: int) -> bool:
        """Return whether nothing is left to replace; `missing`: how many more may start in all."""
        parts = (Part.WAITING, Part.READY, Part.OLD, Part.ENDING)
        return not self._roster.count(*parts)

    async def _keep(self) -> None:
        """Keep the new replicas that are ready; wait a limited time until clients reach them."""
        batch = list(self._roster.each(Part.READY))
        for watch in batch:
            await watch.keep()
            self._roster.note(watch)
        at_gateway = any(watch.run_file.is_at_gateway for watch in batch)
        waits = [asyncio.ensure_future(watch.accepts.wait()) for watch in batch]
        if waits:  # without the gateway one suffices: they share an address
            enough = asyncio.ALL_COMPLETED if at_gateway else asyncio.FIRST_COMPLETED
            await asyncio.wait(waits, timeout=ACCEPT_SECONDS, return_when=enough)
        for wait in waits:
            wait.cancel()
        if at_gateway:
            accepting = [watch for watch in batch if watch.accepts.is_set()]
            with contextlib.suppress(NotReady):  # Envoy learns of them a little later
                await self._gateway.until_reached(self.name, accepting, ACCEPT_SECONDS)

    async def _drain(
        self, batch: Sequence[ReplicaWatch], seconds: float, *, leaves: bool = False
    ) -> None:
        """Drain replicas: each ends with its last session."""
        for watch in batch:
            watch.is_draining = True
            self._drained[watch.replica.id] = watch
            self._roster.note(watch)
            ordinal = watch.replica.ordinal
            self._context.say(f"draining replica {ordinal}: its sessions have {seconds:g} s")
        if any(watch.run_file.is_at_gateway for watch in batch):
            await self._gateway.until_left(self.name)
        for watch in batch:
            await watch.drain(seconds, leaves=leaves)

    @contextlib.asynccontextmanager
    async def _undoing(self) -> AsyncIterator[None]:
        """Undo what can be undone when the body fails, unless the daemon stops."""
        try:
            yield
        except BaseException as exc:
            if STOPPING not in exc.args:
                await self._undo()
            raise

    async def _undo(self) -> None:
        await self._replicas.drop(self._joining())


async def until_done(work: asyncio.Future[Result]) -> Result:
    """Await work that a cancellation must not interrupt; `CancelledError` follows its end."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def shares_of(spec: dict[str, Any], replicas: int) -> list[int | None]:
    """Return how many sessions each replica of an environment may have."""
    return share_sessions(spec.get("max_sessions"), replicas, spec.get("max_replicas"))


def is_ready(watch: ReplicaWatch) -> bool:
    """Return whether a replica of an earlier attempt is ready, by its status file."""
    status = read_status_file(watch.run_file.run_dir) or {}
    return started_replicas.is_ready(watch.run_file, status)
