# SPDX-License-Identifier: Apache-2.0
"""`Changes`: carries out `launch`, `scale` and `restart`, which start replicas, or drain them.

    launch       start what a worker has prepared ─▶ all ready ─▶ the gateway has them
    scale up     start ─▶ all ready ─▶ they are its own; the sessions are divided again
    scale down   share out ─▶ drain the youngest; the request does not wait for their sessions
    restart      `replacement_step` says how many to start, and how many to drain, until nothing
                 is left to do: by default one after another, those that end `together` in one go.
                 Of local replicas one is always left, which has the others' sockets

Nothing is kept of how far a change has come. Its row says that it is under way, the environment's
row how many replicas there are to be, and each run file which request has started its replica: so
whoever carries out the request again looks again, and goes on. Until a new replica is ready, it
is not restarted, gets no session from the gateway if others serve, and does not count for the
environment's state (`ReplicaWatch.is_kept`). Those of a launch are kept by the reconciler, once
they serve. A launch stops what an earlier attempt at it has left, and begins again.

    a new replica fails, or      what was started and is not the environment's own is stopped;
    the request is cancelled     the replicas that it had serve on
    the daemon is killed         the next one is given the request again
    the same, and the request    the next daemon drains what is too much (`Changes.end_surplus`)
    is cancelled meanwhile
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...environments import run_files
from ...environments.engines.providers import Provider, provider_named, share_out
from ...environments.engines.started_replicas import (
    ALIVE,
    READY,
    StartedReplica,
    not_ready,
    raise_if_ended,
    shim_lost,
    started_replica,
)
from ...environments.replica_policy import replacement_step, share_sessions
from ...environments.run_files import RunFile
from ...environments.shim.client import read_status_file
from ...environments.sources.program import prepared_from_json
from ...requests_db.async_store import AsyncStore
from ...requests_db.records import Environment, Request
from ...requests_db.sql import queries
from ...requests_db.transactions import observing
from ...schema.errors import (
    EngineFailed,
    InvalidSpec,
    NotReady,
    NotRunning,
    ReplicaFailed,
)
from ...schema.operation_options import DrainOptions
from ...schema.spec import EnvironmentSpec, sleep_seconds_of
from ...schema.states import RequestState
from ...system.net.access import is_loopback
from ...system.text.units import plural
from ..dispatch.daemon_tasks import STOPPING
from ..operations.base import OperationContext
from ..operations.progress import Phases, ReplicasAwaited, SessionsLeft
from ..operations.scale import RestartPayload, ScalePayload
from .replica_watch import ReplicaWatch, is_alive, is_over
from .replicas import ACCEPT_SECONDS, ReplicaManager

READY_SECONDS = 600.0
STOP_SECONDS = 15.0  # for what has not ended by itself, after its time
_THREADS = ThreadPoolExecutor(32, "provider")  # an engine that hangs keeps its own request alone
PATIENT_SECONDS = 10.0  # without another replica that is ready, until the reason is logged
POLL_INTERVAL_SECONDS = 1.0  # while no replica changes: a time may be over


@dataclass(frozen=True)
class Changes:
    """Gives running environments other replicas."""

    store: AsyncStore
    replicas: ReplicaManager

    async def carry_out(
        self, request: Request, context: OperationContext, prepared: Any = None
    ) -> dict[str, Any]:
        """Carry out a request; one at a time changes an environment that serves.

        Args:
            request: The request.
            context: Where it reports.
            prepared: What the worker of a launch has returned.

        Returns:
            Of a `launch`, `{"environment": {"name", "state", "address", …, "replicas": […]}}`. Of a
            `scale`, `{"environment", "replicas": N, "started": [ids], "draining": [ids],
            "sessions": N}`, where the replicas of the `environment` are those that were started,
            and the sessions those of the draining ones. Of a `restart`, `{"environment",
            "restarted": [{"old", "new"}]}`.

        Raises:
            EnvironmentsError
        """
        name, payload = str(request.environment), request.payload
        with self.replicas.moves(name) as moved:
            given = (name, context, self.replicas, self.store, moved)
            match request.operation:
                case "launch":
                    return await _Launch(*given).run(prepared, payload.get("replaces"))
                case "scale":
                    return await _Scale(*given).run(ScalePayload.model_validate(payload))
                case _:
                    return await _Restart(*given).run(RestartPayload.model_validate(payload))

    async def end_surplus(self, environment: Environment) -> None:
        """Drain the youngest replicas beyond the number that is wanted, if nothing changes that."""
        wanted = wanted_replicas(environment)
        staying = self.replicas.staying(environment.name, environment.request_id)
        if wanted is None or len(staying) <= wanted:
            return
        for operation in ("scale", "restart"):
            if await self.store.read(under_way(operation, environment.name)):
                return
        for watch in staying[wanted:]:
            await watch.drain(DrainOptions().drain_timeout_seconds, leaves=False)


def wanted_replicas(environment: Environment) -> int | None:
    """How many replicas an environment is to have; None where its row does not say."""
    replicas = environment.spec.get("replicas")
    return None if replicas is None else max(replicas, environment.spec.get("min_replicas") or 1)


def under_way(operation: str, name: str) -> queries.Query[list[Request]]:
    """The request of this operation that an environment waits for."""
    states = frozenset({RequestState.PENDING, RequestState.RUNNING})
    return queries.list_requests(states, operation=operation, environment=name, limit=1)


class _Change:
    """One request, and the environment that it changes."""

    def __init__(
        self,
        name: str,
        context: OperationContext,
        replicas: ReplicaManager,
        store: AsyncStore,
        moved: asyncio.Event,
    ) -> None:
        """`moved` is set when a replica of the environment has changed."""
        self.name = name
        self._context = context
        self._replicas = replicas
        self._store = store
        self._moved = moved
        self._launch: str | None = None
        self._ready: dict[str, StartedReplica] = {}  # those that were started, by id
        self._note_start(READY_SECONDS, 0)

    async def _begin(self, reason: str | None) -> Environment:
        environment = await self._store.read(queries.environment(self.name))
        if environment is not None:
            self._launch = environment.request_id
            await self._replicas.adopt(self.name, self._launch)
            await self._replicas.drop([w for w in self._joining() if not _is_ready(w)])
            if staying := self._staying():
                if reason is not None:
                    self._context.say(f"{self.name}: {reason}")
                self._note_start(_ready_seconds(staying[0]), 0)
                return environment
        raise NotRunning(f"{self.name} has no replicas", "launch it again")

    def _staying(self) -> list[ReplicaWatch]:
        return self._replicas.staying(self.name, self._launch)

    def _is_new(self, watch: ReplicaWatch) -> bool:
        data = watch.run_file.data
        return data.get("started_by", watch.request_id) == self._context.request_id

    async def _start(self, like: ReplicaWatch, shares: Sequence[int | None], wanted: int) -> None:
        """Start a replica for each share of the sessions."""
        if not shares:
            return
        self._note_start(_ready_seconds(like), len(shares))
        self._awaited.report(f"{plural(len(shares), 'replica')} starting")
        started = await self._call(
            like.run_file.provider,
            lambda provider: provider.add(
                like.run_file,
                shares,
                replicas=wanted,
                started_by=self._context.request_id,
            ),
        )
        for each in started:
            self._context.say(f"replica {each.ordinal} is starting")

    async def _call(
        self, provider: str, work: Callable[[Provider], list[RunFile]]
    ) -> list[RunFile]:
        """Have a provider start replicas; when cancelled, too, it has ended when this returns."""
        home = self._context.home
        loop = asyncio.get_running_loop()
        thread = loop.run_in_executor(_THREADS, lambda: work(provider_named(provider, home)))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await asyncio.wait([thread])
            raise
        finally:
            await self._replicas.adopt(self.name, self._launch)

    def _note_start(self, ready_seconds: float, count: int, *, offers_fewer: bool = False) -> None:
        self._awaited = ReplicasAwaited(self._context, count, offers_fewer=offers_fewer)
        self._ready_seconds = ready_seconds
        self._waits_since = time.monotonic()
        self._deadline = self._waits_since + ready_seconds

    def _joining(self) -> list[ReplicaWatch]:
        """The new replicas that are not kept yet."""
        watched = self._replicas.watched(self.name, self._launch)
        return [each for each in watched if self._is_new(each) and not each.is_kept.is_set()]

    async def _are_ready(self) -> bool:
        """Whether all new replicas are ready; notes each that is.

        Raises:
            EnvironmentsError: One has failed, or was not ready in time.
        """
        waiting = []
        for watch in self._joining():
            status = watch.status
            if watch.has_failed or is_over(watch.replica.state):
                if status.get("state", "starting") in ALIVE:
                    raise shim_lost(watch.run_file)
                raise_if_ended(watch.run_file, status)
            if status.get("state") not in READY:
                waiting.append(watch)
            elif watch.replica.id not in self._ready:
                self._ready[watch.replica.id] = started_replica(watch.run_file, status)
                self._awaited.on_ready(self._ready[watch.replica.id])
                self._waits_since = time.monotonic()
        if waiting:
            self._report_waiting(waiting)
        return not waiting

    def _report_waiting(self, waiting: list[ReplicaWatch]) -> None:
        now, status = time.monotonic(), waiting[0].status
        why = status.get("problem") or status.get("waiting")
        if now >= self._deadline:
            raise not_ready(waiting[0].run_file, self._ready_seconds, why, len(self._ready))
        if why is not None and now - self._waits_since >= PATIENT_SECONDS:
            verb = "waits" if len(waiting) == 1 else "wait"
            counts = f"{len(self._ready)} of {len(self._ready) + len(waiting)} are ready"
            self._awaited.on_lasting(
                f"{counts}; {len(waiting)} {verb}: {why}", self._deadline - now
            )

    async def _keep(self) -> bool:
        """Keep the new replicas that are ready; whether there are no others."""
        are_all_ready = await self._are_ready()
        ready = [watch for watch in self._joining() if watch.replica.id in self._ready]
        for watch in ready:
            watch.is_kept.set()
        if any(watch.run_file.is_at_gateway for watch in ready):
            with contextlib.suppress(NotReady):  # it learns of them, and will
                await self._replicas.until_reached(self.name, ready, ACCEPT_SECONDS)
        return are_all_ready

    @contextlib.asynccontextmanager
    async def _dropping(self) -> AsyncIterator[None]:
        """Stop what was started and not kept when the body fails, unless the daemon stops."""
        try:
            yield
        except BaseException as exc:
            if STOPPING not in exc.args:
                await self._replicas.drop(self._joining())
            raise

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_INTERVAL_SECONDS):
                await self._moved.wait()
        self._moved.clear()

    async def _drain(self, batch: list[ReplicaWatch], seconds: float) -> None:
        """Take replicas away, which end with their last sessions."""
        for watch in batch:
            watch.is_draining = True
            ordinal = watch.replica.ordinal
            self._context.say(f"draining replica {ordinal}: its sessions have {seconds:g} s")
        if any(watch.run_file.is_at_gateway for watch in batch):
            await self._replicas.until_left(self.name)
        for watch in batch:
            await watch.drain(seconds, leaves=False)


class _Launch(_Change):
    """Starts the replicas of a launch, beside those that it replaces."""

    async def run(self, prepared: dict[str, Any], replaces: str | None) -> dict[str, Any]:
        """Start what a worker has prepared, beside what it `replaces`."""
        began = time.monotonic()
        spec, address = EnvironmentSpec(**prepared["spec"]), prepared["address"]
        phases = Phases.of_launch(self._context, spec)
        self._launch = self._context.request_id
        try:
            self._note_start(spec.ready_timeout_seconds, spec.replicas, offers_fewer=True)
            started = await self._call(
                spec.provider,
                lambda provider: provider.start(
                    spec,
                    prepared_from_json(prepared["prepared"]),
                    launch_id=self._context.request_id,
                    address=address,
                    replaces=replaces,
                ),
            )
            first = started[0]
            is_known = first.is_at_gateway or not first.is_elsewhere  # some engines tell it later
            where = f" at {first.address}" if is_known else ""
            phases.enter_aloud("starting", f"{plural(len(started), 'replica')} starting{where}")
            while not await self._are_ready():
                await self._wait()
            ready = sorted(self._ready.values(), key=lambda replica: replica.ordinal)
            check_ready(spec, ready, is_update=replaces is not None)
            if address is not None and replaces is None:  # of an update it hears when that serves
                watched = self._replicas.watched(self.name, self._launch)
                seconds = min(ACCEPT_SECONDS, spec.ready_timeout_seconds)
                await self._replicas.until_reached(self.name, watched, seconds)
        except BaseException:  # also when the daemon stops: the next one begins again
            with contextlib.suppress(EngineFailed):
                await self._replicas.stop_launch(self.name, self._launch, 0.0)
            raise
        for note in dict.fromkeys(note for replica in ready for note in replica.notes):
            self._context.say(f"note: {note}")
        address = address or first.address
        seconds = time.monotonic() - began
        self._context.say(f"{self.name} is ready at {address} ({seconds:.1f} s)")
        phases.enter("ready", f"{self.name} is ready at {address}")
        phases.finish()
        return {
            "environment": {
                "name": self.name,
                "state": "READY",
                "address": address,
                "has_token": spec.token is not None,
                "is_exposed": not is_loopback(spec.host),
                "replicas": [replica.to_json() for replica in ready],
            }
        }


class _Scale(_Change):
    """Starts the replicas that an environment lacks, or drains those beyond the wanted number."""

    async def run(self, payload: ScalePayload) -> dict[str, Any]:
        """Give it the number of replicas that is asked for."""
        await self._begin(payload.reason)
        staying = self._staying()
        spec = staying[0].run_file.data["spec"]
        self._check_range(payload, spec)
        wanted = payload.replicas
        shares = _shares(spec, wanted)
        async with self._dropping():
            await self._start(staying[0], shares[len(staying) :], wanted)
            while not await self._are_ready():
                await self._wait()
            await self._keep()
            await self._store.write(observing.set_replicas, self.name, wanted, now=time.time())
        staying, surplus = self._staying()[:wanted], self._staying()[wanted:]
        await asyncio.to_thread(_share_out, staying, shares, wanted)
        started = sorted(self._ready.values(), key=lambda replica: replica.ordinal)
        await self._drain(surplus, payload.drain_timeout_seconds)
        return {
            "environment": {
                "name": self.name,
                "replicas": [replica.to_json() for replica in started],
            },
            "replicas": wanted,
            "started": [replica.id for replica in started],
            "draining": [watch.replica.id for watch in surplus],
            "sessions": sum(map(_sessions, surplus)),
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


class _Restart(_Change):
    """Replaces replicas of an environment."""

    async def run(self, payload: RestartPayload) -> dict[str, Any]:
        """Replace the replicas that are asked for."""
        environment = await self._begin(payload.reason)
        wanted = wanted_replicas(environment) or len(self._staying())
        seconds = payload.drain_timeout_seconds
        surge = max(payload.max_surge, len(payload.together))
        like = self._staying()[0]
        if wanted == 1 and like.run_file.is_local and not surge:
            raise InvalidSpec(
                f"{self.name} has one replica, which cannot be missing", "allow one more"
            )
        replaced: list[ReplicaWatch] = []
        left: SessionsLeft | None = None
        async with self._dropping():
            while True:
                kept_all = await self._keep()
                staying = self._staying()
                new = [watch for watch in staying if self._is_new(watch)]
                others = [watch for watch in staying if not self._is_new(watch)]
                old = _chosen(others, payload, is_begun=bool(new))
                ending = [watch for watch in replaced if not is_over(watch.replica.state)]
                start, drain = replacement_step(
                    wanted,
                    staying=len(staying) - len(new) - len(old),
                    old=len(old),
                    new=len(new),
                    ready=sum(watch.is_kept.is_set() for watch in new),
                    ending=len(ending),
                    surge=surge,
                    unavailable=payload.max_unavailable,
                )
                if start:
                    ids = {watch.replica.id for watch in old}
                    others = [watch for watch in staying if watch.replica.id not in ids]
                    shares = _free_shares(like, wanted, others)
                    like = staying[0] if staying else like
                    await self._start(like, shares[:start], wanted)
                elif batch := old[: min(drain, len(staying) - like.run_file.is_local)]:
                    counts = {watch.replica.id: _sessions(watch) for watch in batch}
                    left, until = SessionsLeft(self._context, counts, seconds), time.monotonic()
                    until += seconds + STOP_SECONDS
                    replaced += batch
                    await self._drain(batch, seconds)
                elif kept_all and not old and not ending:
                    break
                else:
                    if left is not None and ending:
                        _note_left(left, replaced, until)
                    await self._wait()
        olds = [watch.replica.id for watch in replaced]
        before: list[str | None] = [None] * (len(self._ready) - len(olds))  # an earlier attempt's
        pairs = zip([*before, *olds], self._ready, strict=False)
        return {
            "environment": {"name": self.name},
            "restarted": [{"old": old, "new": new} for old, new in pairs],
        }


def _note_left(left: SessionsLeft, replaced: list[ReplicaWatch], until: float) -> None:
    """Report the sessions that are left of replicas; raise `NotReady` after their time."""
    for watch in replaced:
        left.note(watch.replica.id, 0 if is_over(watch.replica.state) else _sessions(watch))
        if not is_over(watch.replica.state) and time.monotonic() >= until:
            raise NotReady(
                f"{watch.replica.id} has not ended yet: its engine does not answer, or is slow",
                "it ends when it does; restart the others then",
            )


def check_ready(spec: EnvironmentSpec, ready: Iterable[StartedReplica], *, is_update: bool) -> None:
    """Refuse what would never be scaled, or whose sessions would all fail, once it is ready."""
    if spec.max_replicas is not None and any(each.max_sessions is None for each in ready):
        raise InvalidSpec(
            f"the server in {spec.source} is its own, and does not say how many sessions it has:"
            " it would never be scaled (--max)",
            "leave that out; or build an image with our server: openenv image build",
        )
    cause = next((each.sessions_fail for each in ready if each.sessions_fail), None)
    if cause is not None:
        raise ReplicaFailed(
            f"the sessions of this {'update' if is_update else 'launch'} would fail: {cause}",
            "mend the constructor, or what it needs, and launch again",
        )


def _chosen(
    old: list[ReplicaWatch], payload: RestartPayload, *, is_begun: bool
) -> list[ReplicaWatch]:
    """Return which of the replicas are to be replaced; `is_begun`: some have been."""
    if payload.together:  # some may have ended meanwhile
        return [watch for watch in old if watch.replica.ordinal in payload.together]
    if payload.replica is None:
        return old
    chosen = [watch for watch in old if watch.replica.ordinal == payload.replica]
    if not chosen and not is_begun:
        numbers = ", ".join(str(number) for number in sorted(w.replica.ordinal for w in old))
        raise NotRunning(
            f"{payload.name} has no replica {payload.replica}", f"its replicas are {numbers}"
        )
    return chosen


def _ready_seconds(like: ReplicaWatch) -> float:
    return float(like.run_file.data["spec"].get("ready_timeout_seconds") or READY_SECONDS)


def _shares(spec: dict[str, Any], replicas: int) -> list[int | None]:
    return share_sessions(spec.get("max_sessions"), replicas, spec.get("max_replicas"))


def _free_shares(
    like: ReplicaWatch, replicas: int, others: Iterable[ReplicaWatch]
) -> list[int | None]:
    """Return the shares that replicas can have beside others."""
    shares = _shares(like.run_file.data["spec"], replicas)
    for watch in others:
        with contextlib.suppress(ValueError):  # it has another, from before
            shares.remove(watch.run_file.max_sessions)
    return shares


def _share_out(watches: list[ReplicaWatch], shares: list[int | None], wanted: int) -> None:
    share_out([w.run_file for w in watches], shares[: len(watches)], wanted)
    for watch in watches:
        watch.run_file = run_files.read(watch.run_file.run_dir) or watch.run_file


def _is_ready(watch: ReplicaWatch) -> bool:
    """Whether what an earlier attempt has started is ready, as far as it has been written down."""
    status = read_status_file(watch.run_file.run_dir) or {}
    is_there = is_alive(status) or not watch.run_file.is_local
    return is_there and status.get("state") in READY


def _sessions(watch: ReplicaWatch) -> int:
    return watch.status.get("sessions") or 0
