# SPDX-License-Identifier: Apache-2.0
"""`Changes`: carries out `launch`, `scale`, `restart` and `down`, which start replicas or end them.

    launch       start what a worker has prepared ─▶ all ready ─▶ the gateway has them
    scale up     start ─▶ all ready ─▶ the environment keeps them; the sessions are divided again
    scale down   new quotas ─▶ drain the youngest; the request does not wait for their sessions
    restart      `replacement_step` says how many to start and how many to drain, until all are
                 replaced: by default one after another, but all those in `together` at once
    update       the same for all replicas of an earlier launch; by default all are started at once.
                 When all are ready the environment's row names the new launch, and the replicas
                 that are left of the old one are drained
    down         stop all; its row says so

One local replica always remains, because it holds the others' sockets.

The progress of a change is not stored. The request's row says that it is under way; the
environment's row says which launch serves and how many replicas are wanted; each run file says
which request started its replica. Whoever carries the request out again reads these. Until a new
replica is ready, it is not restarted, gets no session if others serve, and does not count for the
environment's state (`ReplicaWatch.is_kept`). In an update this holds until all that were started
are ready. The reconciler marks replicas of a first launch as kept once they serve.

`docs/decisions/0032` says what follows when a process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import anyio

from ...environments import run_files
from ...environments.engines.providers import share_out
from ...environments.replica_policy import replacement_room
from ...environments.sources.program import prepared_from_json
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Generation, Request
from ...requests_db.sql import queries
from ...requests_db.transactions import observing
from ...schema.errors import EngineFailed, InvalidSpec, NotRunning, ReplicaFailed
from ...schema.operation_options import DrainOptions
from ...schema.spec import GRACE_SECONDS, EnvironmentSpec, sleep_seconds_of
from ...schema.states import UPDATABLE, EnvironmentState, GenerationState, RequestState
from ...system.net.access import is_loopback
from ...system.text.safe_text import without_secrets
from ...system.text.units import plural
from ..dispatch.running import STOPPING
from ..errors import ApiError
from ..operations.base import OperationContext, SessionsLeft
from ..operations.replicas import RestartPayload, ScalePayload
from . import replacing
from .gateway import GatewayManager
from .own_requests import Submit
from .replica_watch import BEGIN_SESSIONS, ReplicaWatch
from .replicas import ReplicaManager, is_leaving
from .watches import Part

DRAIN_SECONDS = DrainOptions().drain_timeout_seconds  # used if the launch is no longer known


@dataclass(frozen=True)
class Changes:
    """Changes the replicas of environments, and takes environments down."""

    store: AsyncStore
    replicas: ReplicaManager
    gateway: GatewayManager
    submit: Submit
    _retiring: set[str] = field(init=False, default_factory=set)  # launches

    async def carry_out(
        self, request: Request, context: OperationContext, prepared: Any = None
    ) -> dict[str, Any]:
        """Carry out a request; only one at a time may change an environment that serves.

        `prepared` is what the worker of a launch has returned.

        Returns:
            For a `launch`, `{"environment": {"name", "state", "address", …, "replicas": […]}}`. For
            a `scale`, `{"environment", "replicas": N, "started": [ids], "draining": [ids],
            "sessions": N}`: `environment` lists the replicas that were started, and `sessions`
            counts the sessions of the draining replicas. For a `restart`, `{"environment",
            "restarted": [{"old", "new"}]}`. For a `down`, `{"environment": {"name", "state"},
            "stopped": [ids]}`.
        """
        name, payload = str(request.environment), request.payload
        if request.operation == "down":
            return await self._take_down(name, context)
        with self.replicas.moves(name) as moves:
            given = (name, context, self.store, self.replicas, self.gateway, moves)
            match request.operation:
                case "launch":
                    return await _Launch(*given).run(prepared, payload)
                case "scale":
                    return await _Scale(*given).run(ScalePayload.model_validate(payload))
                case _:
                    return await _Restart(*given).run(RestartPayload.model_validate(payload))

    async def _take_down(self, name: str, context: OperationContext) -> dict[str, Any]:
        environment = await self.store.read(queries.environment(name))
        if environment is None or environment.state is not EnvironmentState.STOPPING:
            # An earlier daemon took it down, and another environment may have the name by now.
            return {"environment": {"name": name, "state": "STOPPED"}, "stopped": []}
        sessions = {w.replica.id: w.sessions for w in self.replicas.watches.of(name)}
        left = SessionsLeft(context, sessions, GRACE_SECONDS)
        stopped = await self.replicas.stop_all(name, on_sessions=left.note)
        for replica_id in stopped:
            context.say(f"stopped {replica_id}")
        if not stopped:
            context.say(f"no replica of {name} was running")
        await self.replicas.status.set_environment(name, EnvironmentState.STOPPED)
        return {"environment": {"name": name, "state": "STOPPED"}, "stopped": stopped}

    async def end_surplus(self, environment: Environment) -> None:
        """Drain the youngest replicas beyond the wanted number, unless a request is changing it."""
        wanted = wanted_replicas(environment)
        staying = self.replicas.staying(environment.name, environment.request_id)
        if wanted is None or len(staying) <= wanted:
            return
        for operation in ("scale", "restart"):
            if await self.store.read(under_way(operation, environment.name)):
                return
        for watch in staying[wanted:]:
            await watch.drain(DRAIN_SECONDS, leaves=False)

    async def end_other_generations(self, environment: Environment) -> None:
        """Drain replicas that an update has replaced, or has left behind when it failed."""
        name = environment.name
        for each in await self.store.read(queries.generations(name)):
            if each.request_id == environment.request_id or each.request_id in self._retiring:
                continue
            launch = await self.store.read(queries.request(each.request_id))
            is_under_way = launch is not None and not launch.state.is_final
            if each.state is GenerationState.STARTING and is_under_way:
                await self.replicas.adopt(name, each.request_id)
            elif each.state is GenerationState.STARTING:
                self._retire(each, _drain_seconds(launch), _why_not_ready(launch))
            elif each.state is GenerationState.DRAINING and not self.replicas.is_changing(name):
                serving = await self.store.read(queries.request(environment.request_id or ""))
                self._retire(each, _drain_seconds(serving))

    def _retire(self, generation: Generation, seconds: float, error: str | None = None) -> None:
        self._retiring.add(generation.request_id)
        work = self._until_retired(generation, seconds, error)
        self.replicas.tasks.spawn(work, f"retire {generation.environment} {generation.number}")

    async def _until_retired(
        self, generation: Generation, seconds: float, error: str | None
    ) -> None:
        """Drain a generation that no longer serves; record its end once all its replicas ended."""
        name, launch = generation.environment, generation.request_id
        try:
            await self.replicas.adopt(name, launch)
            watches = self.replicas.watches.of(name, launch)
            unready = [w for w in watches if not is_leaving(w) and not replacing.is_ready(w)]
            await self.replicas.drop([] if error is None else unready)
            ending = self.replicas.watches.of(name, launch)
            for watch in ending:
                if not is_leaving(watch):
                    await watch.drain(seconds, leaves=True)
            if error is not None:
                start = partial(self._start_missing, name)
                await self.replicas.status.insist(f"scale {name}", start)
            if tasks := [watch.task for watch in ending]:
                await asyncio.wait(tasks, timeout=seconds + replacing.STOP_SECONDS)
            status = self.replicas.status
            stop = partial(self.replicas.stop_all, name, launch=launch)
            await status.insist(f"stop launch {launch} of {name}", stop)
            end = partial(status.end_generation, generation, error)
            await status.insist(f"write the end of launch {launch} of {name}", end)
        finally:
            self._retiring.discard(launch)

    async def _start_missing(self, name: str) -> None:
        """Submit a `scale` if an update that failed has drained replicas that are wanted."""
        environment = await self.store.read(queries.environment(name))
        if environment is None or environment.state not in UPDATABLE:
            return
        wanted = wanted_replicas(environment) or 0
        count = len(self.replicas.staying(name, environment.request_id))
        if count < wanted:
            reason = f"an update that failed has left {count} of {plural(wanted, 'replica')}"
            with contextlib.suppress(ApiError):  # another request changes its replicas
                await self.submit("scale", {"name": name, "replicas": wanted, "reason": reason})


def _drain_seconds(launch: Request | None) -> float:
    payload = {} if launch is None else launch.payload
    return float(payload.get("drain_timeout_seconds", DRAIN_SECONDS))


def _why_not_ready(launch: Request | None) -> str:
    if launch is None or launch.error is None:
        return observing.CANCELLED
    return str(without_secrets(launch.error.message, launch.payload))


def wanted_replicas(environment: Environment) -> int | None:
    """Return how many replicas an environment should have; None where its row does not say."""
    replicas = environment.spec.get("replicas")
    return None if replicas is None else max(replicas, environment.spec.get("min_replicas") or 1)


def under_way(operation: str, name: str) -> queries.Query[list[Request]]:
    """The query for an environment's pending or running request of this operation."""
    states = frozenset({RequestState.PENDING, RequestState.RUNNING})
    return queries.list_requests(states, operation=operation, environment=name, limit=1)


class _Launch(replacing.Change):
    """Starts the replicas of a launch, beside those that it replaces."""

    is_whole = True
    models = (Part.KEPT, Part.READY, Part.WAITING)

    async def run(self, prepared: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
        """Start what a worker has prepared; where the environment runs, replace its replicas."""
        began, self._prepared, self._payload = time.monotonic(), prepared, payload
        self._spec = spec = EnvironmentSpec(**prepared["spec"])
        if payload["replaces"] is None:
            await self._start_first()
        else:
            await self._update()
        for note in dict.fromkeys(note for replica in self._started for note in replica.notes):
            self._context.say(f"note: {note}")
        address, seconds = self._address, time.monotonic() - began
        self._context.say(f"{self.name} is ready at {address} ({seconds:.1f} s)")
        self._context.enter("ready", f"{self.name} is ready at {address}")
        return {
            "environment": {
                "name": self.name,
                "state": "READY",
                "address": address,
                "has_token": spec.token is not None,
                "is_exposed": not is_loopback(spec.host),
                "replicas": [asdict(replica) for replica in self._started],
            }
        }

    @property
    def _address(self) -> str:
        """The gateway's, or that of a replica."""
        watched = self._replicas.watches.of(self.name, self._context.request_id)
        return str(self._prepared["address"] or watched[0].run_file.address)

    async def _start(self, count: int) -> None:
        if self._roster.count(*self.models):
            return await super()._start(count)
        spec, request_id = self._spec, self._context.request_id
        self._note_start(spec.ready_timeout_seconds, count)
        started = await self._call(
            spec.provider,
            lambda provider: provider.start(
                spec,
                prepared_from_json(self._prepared["prepared"]),
                count=count,
                launch_id=request_id,
                address=self._prepared["address"],
                replaces=self._payload["replaces"],
            ),
        )
        first = started[0]
        is_known = first.is_at_gateway or not first.is_elsewhere  # some engines report it later
        where = f" at {first.address}" if is_known else ""
        self._context.enter_aloud("starting", f"{plural(count, 'replica')} starting{where}")
        await self._take_moves(0.0)
        self._divide(self._prepared["spec"], spec.replicas, self._roster.each(*self.models))
        return None

    async def _start_first(self) -> None:
        """Start the replicas of an environment that has none."""
        self._launch = self._context.request_id
        try:
            await self._start(self._spec.replicas)
            while self._roster.count(Part.WAITING):
                await self._wait()
            self._check_ready()
            if self._prepared["address"] is not None:
                watched = self._replicas.watches.of(self.name, self._launch)
                seconds = min(replacing.ACCEPT_SECONDS, self._spec.ready_timeout_seconds)
                await self._gateway.until_reached(self.name, watched, seconds)
        except BaseException:  # also if the daemon stops: the next daemon starts over
            with contextlib.suppress(EngineFailed):
                await self._replicas.stop_all(self.name, 0.0, launch=self._launch)
            raise

    async def _update(self) -> None:
        """Replace all replicas, and write this launch into the environment's row."""
        environment = await self._store.read(queries.environment(self.name))
        if environment is None or environment.state not in UPDATABLE:
            raise NotRunning(f"{self.name} was taken down meanwhile", "launch it again")
        self._is_switched = environment.request_id == self._context.request_id  # an earlier attempt
        await self._look(self._context.request_id)
        olds = list(self._roster.each(Part.OLD))
        self._keeps_one = any(watch.run_file.is_local for watch in olds)
        wanted, seconds = self._spec.replicas, self._payload["drain_timeout_seconds"]
        before = 0 if self._is_switched else wanted_replicas(environment) or len(olds)
        size = max(wanted, before)
        room = replacement_room(
            wanted, self._spec.max_surge, self._spec.max_unavailable, default_surge=size
        )
        if size == 1 and not room[0] and self._keeps_one:
            raise _cannot_be_missing(self.name)
        self._divide(self._prepared["spec"], wanted, self._roster.each(*self.models))
        try:
            async with self._undoing():
                await self._replace(size, wanted, room, seconds)
                self._check_ready()
                if not self._is_switched:
                    await replacing.until_done(asyncio.ensure_future(self._switch()))
            await self._keep()
            rest = list(self._roster.each(Part.OLD))
            await self._drain(rest, seconds, leaves=True)
            await self._until_none_begins(rest)
        except asyncio.CancelledError as exc:
            if STOPPING in exc.args or not self._is_switched:
                raise
            # Too late: it serves, so it has succeeded. The reconciler ends the old generation.
            self._context.say("cancelled after the new generation had begun to serve")

    def _is_chosen(self, _: ReplicaWatch) -> bool:
        return True

    def _has_ended(self, missing: int) -> bool:
        return not missing and not self._roster.count(Part.WAITING)

    async def _keep(self) -> None:
        self._check_ready()
        await super()._keep()

    def _check_ready(self) -> None:
        """Refuse replicas that would never be scaled, or whose sessions would all fail."""
        is_sized = all(each.max_sessions is not None for each in self._started)
        if self._spec.max_replicas is not None and not is_sized:
            raise InvalidSpec(
                f"{self._spec.source} runs its own server, which does not report how many sessions"
                " it has: the environment would never be scaled (--max)",
                "leave out --max, or build an image with our server: openenv image build",
            )
        cause = next((each.sessions_fail for each in self._started if each.sessions_fail), None)
        if cause is not None:
            kind = "launch" if self._payload["replaces"] is None else "update"
            raise ReplicaFailed(
                f"the sessions of this {kind} would fail: {cause}",
                "fix the constructor, or what it needs, and launch again",
            )

    async def _switch(self) -> None:
        found = await self._store.read(queries.generations(self.name))
        own = next((g for g in found if g.request_id == self._context.request_id), None)
        switch = self._replicas.observer.switch
        if own is None or not await switch(own, self._payload, self._address):
            raise NotRunning(f"{self.name} was taken down meanwhile", "launch it again")
        self._is_switched = True

    async def _until_none_begins(self, batch: Iterable[ReplicaWatch]) -> None:
        """Wait, for a limited time, until replaced replicas no longer begin sessions."""
        left = {each.replica.id for each in batch if each.replica.state in BEGIN_SESSIONS}
        with anyio.move_on_after(replacing.ACCEPT_SECONDS):
            while left:
                for watch in await self._take_moves(replacing.POLL_INTERVAL_SECONDS):
                    if watch.replica.state not in BEGIN_SESSIONS:
                        left.discard(watch.replica.id)

    async def _undo(self) -> None:
        """Stop the new replicas that are not kept; `end_other_generations` does the rest."""
        if not self._is_switched:
            await super()._undo()


class _Scale(replacing.Change):
    """Starts the replicas that an environment lacks, or drains those beyond the wanted number."""

    async def run(self, payload: ScalePayload) -> dict[str, Any]:
        """Give the environment the number of replicas that is asked for."""
        await self._begin(payload.reason)
        staying, wanted = self._staying(), payload.replicas
        spec = staying[0].run_file.data["spec"]
        self._check_range(payload, spec)
        shares = replacing.shares_of(spec, wanted)
        async with self._undoing():
            if missing := shares[len(staying) :]:
                await self._add(staying[0].run_file, missing, wanted)
            while self._roster.count(Part.WAITING):
                await self._wait()
            await self._keep()
            await self._store.write(observing.set_replicas, self.name, wanted, now=time.time())
        staying, surplus = self._staying()[:wanted], self._staying()[wanted:]
        if spec.get("max_sessions") is not None:
            await asyncio.to_thread(_share_out, staying, shares)
        await self._drain(surplus, payload.drain_timeout_seconds)
        return {
            "environment": {
                "name": self.name,
                "replicas": [asdict(replica) for replica in self._started],
            },
            "replicas": wanted,
            "started": [replica.id for replica in self._started],
            "draining": [watch.replica.id for watch in surplus],
            "sessions": sum(watch.sessions for watch in surplus),
        }

    def _check_range(self, payload: ScalePayload, spec: dict[str, Any]) -> None:
        least, most = spec.get("min_replicas") or 1, spec.get("max_replicas")
        if most is not None and not least <= payload.replicas <= most:
            raise InvalidSpec(
                f"{self.name} scales itself between {least} and {most} replicas, and"
                f" {payload.replicas} is not among these",
                "launch it with another --min or --max",
            )
        if most is None and payload.replicas > 1 and sleep_seconds_of(spec) is not None:
            self._context.say(f"{self.name} does not sleep while it has several replicas")


class _Restart(replacing.Change):
    """Replaces replicas of an environment."""

    async def run(self, payload: RestartPayload) -> dict[str, Any]:
        """Replace the replicas that are asked for."""
        self._payload, together = payload, len(payload.together)
        environment = await self._begin(payload.reason)
        staying, spec = self._staying(), self._staying()[0].run_file.data["spec"]
        wanted = wanted_replicas(environment) or len(staying)
        others = [watch for watch in staying if self._is_new(watch) or not self._is_chosen(watch)]
        is_there = len(others) < len(staying) or any(map(self._is_new, staying))
        if payload.replica is not None and not is_there:
            numbers = ", ".join(map(str, sorted(w.replica.ordinal for w in staying)))
            message = f"{self.name} has no replica {payload.replica}"
            raise NotRunning(message, f"its replicas are {numbers}")
        surge, unavailable = replacement_room(
            wanted,
            payload.max_surge or spec.get("max_surge"),
            payload.max_unavailable or spec.get("max_unavailable"),
            default_surge=1,
        )
        surge = max(surge, together)
        if wanted == 1 and self._keeps_one and not surge:
            raise _cannot_be_missing(self.name)
        self._divide(spec, wanted, others)
        async with self._undoing():
            room = (surge, unavailable)
            await self._replace(wanted, wanted, room, payload.drain_timeout_seconds)
        olds = list(self._drained)
        before: list[str | None] = [None] * (len(self._ready) - len(olds))  # drained earlier
        pairs = zip([*before, *olds], self._ready, strict=False)
        return {
            "environment": {"name": self.name},
            "restarted": [{"old": old, "new": new} for old, new in pairs],
        }

    def _is_chosen(self, watch: ReplicaWatch) -> bool:
        ordinal, payload = watch.replica.ordinal, self._payload
        if payload.together:  # some may have ended meanwhile
            return ordinal in payload.together
        return payload.replica in (None, ordinal)


def _cannot_be_missing(name: str) -> InvalidSpec:
    return InvalidSpec(f"{name} has one replica, which cannot be missing", "set max_surge: 1")


def _share_out(watches: list[ReplicaWatch], shares: list[int | None]) -> None:
    """Give replicas other shares of the sessions; those whose share stays are not written."""
    pairs = zip(watches, shares, strict=False)
    changed = {w: share for w, share in pairs if share != w.run_file.max_sessions}
    share_out([watch.run_file for watch in changed], changed.values())
    for watch in changed:
        watch.run_file = run_files.read(watch.run_file.run_dir) or watch.run_file
