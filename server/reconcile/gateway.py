# SPDX-License-Identifier: Apache-2.0
"""`GatewayManager`: keeps the gateway running, and its files up to date with the tables.

    bus: an environment, a replica changed ──▶ tables, watches ──▶ backends ──▶ files ──▶ Envoy
                                                   └─ no environment needs it ─▶ it is stopped
                                                   └─ no replica: its requests are held
    a replica's status ──▶ note ──in a moment, if others are full──▶ files
    the gateway's shim ──▶ ReplicaWatch ──▶ start again, a new shim
                               └─ given up ─▶ a pause, then a new watch

It reads all environments at first, and whenever events were lost; after an event, those that the
event names; in a home without a gateway, none. Only what has changed is written. See
`environments/gateway/__init__.py` for the failure cases. Everything here runs on the daemon's loop;
what blocks goes through `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import anyio

from ...environments.gateway import envoy, process
from ...environments.gateway.configuration import MAX_ASKED, Backend, Endpoint
from ...environments.gateway.envoy import BackendFiles, EndpointStatus
from ...environments.replica_policy import MAX_PAUSE_SECONDS
from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.records import Environment, Event, Replica, RequestError
from ...requests_db.sql import queries
from ...schema.errors import EngineFailed, NotReady
from ...schema.layout import Layout
from ...schema.protocol import LOOPBACK
from ...schema.states import SERVING, ReplicaState
from ...system.net.access import is_loopback
from ...system.text.json_lines import Json
from ..events import EventBus
from .held_requests import HeldRequests
from .replica_watch import ReplicaWatch, new_replica
from .replicas import ReplicaManager
from .work_queue import BackgroundTasks

log = logging.getLogger(__name__)

LEFT_SECONDS = 5.0  # for Envoy to read that others drain
HOLDING_SOCKET = "held.sock"
HOLD_SECONDS = 600.0  # for a replica to become ready: what a launch gives one, too
PATIENCE_SECONDS = 5.0  # how long no replica may be able to start, before requests are refused
FULL_SECONDS = 0.5  # until Envoy learns that a replica is full, or no longer
STOP_SECONDS = 10.0  # to stop a gateway that nothing wants, when the daemon ends
CHANGE_POLL_INTERVAL_SECONDS = 1.0  # while nothing was written
ENVOY_POLL_INTERVAL_SECONDS = 0.02  # until Envoy has what was written

Seen = list[EndpointStatus] | None  # None: Envoy does not answer

_SERVING = (ReplicaState.READY, ReplicaState.DRAINING)


@dataclass(eq=False)
class GatewayProcess:
    """Keeps the process running that a launch has started; owns the watch over it, and its port.

    The port is kept from other users while the daemon runs, also when the shim has been killed.
    """

    tasks: BackgroundTasks
    layout: Layout
    begin_anew: Callable[[], Coroutine[Any, Any, None]]  # follows whatever runs by then
    watch: ReplicaWatch | None = field(init=False, default=None)
    _port_guard: contextlib.ExitStack = field(init=False, default_factory=contextlib.ExitStack)

    async def follow(self) -> None:
        """Watch the process of a gateway that a launch has started meanwhile."""
        found = await asyncio.to_thread(process.read_gateway, self.layout)
        watch = self.watch
        if found is None or (watch and watch.is_of(found.run_file) and not watch.task.done()):
            return
        await self._unwatch()
        self._port_guard.close()
        with contextlib.suppress(OSError):  # another user has it, so Envoy's start fails, too
            self._port_guard.enter_context(process.hold_port(found))
        self.watch = ReplicaWatch(
            new_replica(found.run_file),
            found.run_file,
            _log_state,
            self._give_up,
            revive=lambda _: process.revive(self.layout),
        )
        self.watch.is_kept.set()
        self.watch.task = self.tasks.spawn(self.watch.run(), "watch the gateway")

    async def _give_up(self, _: Replica, error: RequestError) -> None:
        """Pause, and begin again: clients reach these environments only by the gateway."""
        log.error("the gateway cannot be kept running: %s", error.message)
        self.tasks.spawn(self._begin_anew(), "restart the gateway")

    async def _begin_anew(self) -> None:
        await asyncio.sleep(MAX_PAUSE_SECONDS)
        await self._unwatch()
        await self.begin_anew()

    async def _unwatch(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.task.cancel()
            await asyncio.gather(watch.task, return_exceptions=True)

    async def stop(self) -> None:
        """End the process; the caller has its lock."""
        await self._unwatch()
        self._port_guard.close()
        await asyncio.to_thread(process.stop, self.layout)


@dataclass(eq=False)
class GatewayManager:
    """Owns the configuration of this home's gateway, and the watch over its process."""

    store: AsyncStore
    bus: EventBus
    tasks: BackgroundTasks
    replicas: ReplicaManager
    layout: Layout
    process: GatewayProcess = field(init=False)
    _written: dict[str, Backend] = field(init=False, default_factory=dict)  # by name
    _noted: set[str] = field(init=False, default_factory=set)  # looked at in a moment
    _has_written: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _held: HeldRequests = field(init=False)
    _files: BackendFiles = field(init=False)
    _reconciling: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _looking: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)  # at Envoy
    _next_look: asyncio.Task[Seen] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.process = GatewayProcess(self.tasks, self.layout, self._reconcile_insistently)
        self._held = HeldRequests(self.layout.sockets / HOLDING_SOCKET, self.until_served)
        self._files = BackendFiles(process.config_folder(self.layout.run_dir(process.NAME)))

    async def follow(self) -> None:
        """Reconcile now, and after every change, until cancelled.

        Then a gateway that nothing wants any more is stopped: the last `down` before the daemon
        ends may not have been handled yet.
        """
        try:
            with self.bus.subscribe() as subscription:
                while True:
                    subscription.lagged = False  # before the tables are read
                    await self._reconcile_insistently()
                    while not subscription.lagged:
                        if names := _environments_in(await subscription.next()):
                            await self._reconcile_insistently(names)
        finally:
            await self._held.stop()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._stop_if_unused()
            except (DatabaseError, EngineFailed, OSError) as exc:  # the next daemon tries again
                log.warning("cannot see whether the gateway is still wanted: %s", exc)

    async def status(self) -> Json:
        """Return what `openenv gateway status` shows; `gateway` is null where none runs."""
        found = await asyncio.to_thread(process.read_gateway, self.layout)
        if found is None:
            aside = await asyncio.to_thread(process.set_aside, self.layout)
            return {"gateway": aside and {"state": "UNKNOWN", "problem": aside.sentence}}
        shown: Json = {
            "address": found.options.address,
            "tls": bool(found.options.certificate),
            "log": found.run_file.log_path,
            "state": "UNKNOWN",
        }
        if self.process.watch is not None:
            replica = self.process.watch.replica
            shown |= {"state": replica.state.value, "pid": replica.pid, "exit": replica.exit}
            shown["restarts"] = replica.restarts
        try:
            seen = await asyncio.to_thread(envoy.endpoint_statuses, found.admin_socket)
            connections = await asyncio.to_thread(found.connections)
            shown["connections"] = asdict(connections)
            if connections.problem is not None:
                shown["problem"] = connections.problem
        except OSError as exc:
            seen, shown["problem"] = [], f"Envoy does not answer: {exc}"
        names = [environment.name for environment in await self._environments()]
        shown["environments"] = [
            {
                "name": name,
                "address": found.options.address_of(name),
                "replicas": [asdict(each) for each in seen if each.environment == name],
            }
            for name in names
        ]
        return {"gateway": shown}

    async def until_reached(
        self, name: str, replicas: Iterable[ReplicaWatch], seconds: float
    ) -> None:
        """Wait until Envoy sends sessions to these replicas of an environment, or raise `NotReady`.

        Its files are written first, because no event says that a server is no longer held.
        """
        await self._reconcile_insistently({name})
        if await asyncio.to_thread(process.read_gateway, self.layout) is None:
            return
        missing = {"{}:{}".format(*each.endpoint) for each in replicas}

        def has_all(_: Backend | None, seen: Seen) -> bool | None:
            missing.difference_update(each.address for each in seen or () if each.is_healthy)
            return None if missing else True

        try:
            async with asyncio.timeout(seconds):
                await self._until_seen(name, has_all)
        except TimeoutError:
            who = ", ".join(sorted(missing))
            raise NotReady(
                f"the gateway had no connection to {who} after {seconds:g} s",
                "openenv gateway status shows what it sees",
            ) from None

    async def until_left(self, name: str) -> None:
        """Wait for a while until Envoy sends no session of an environment to what is drained."""
        await self._reconcile_insistently({name})
        with anyio.move_on_after(LEFT_SECONDS):  # its clients are sent on by the replica
            await self._until_seen(name, _has_left)

    async def _reconcile_insistently(self, names: Collection[str] | None = None) -> None:
        """Reconcile these environments, or all; try again until that succeeds."""
        await self.replicas.status.insist("update the gateway", partial(self._reconcile, names))

    async def _reconcile(self, names: Collection[str] | None) -> None:
        async with self._reconciling:  # or what was read earlier might be written later
            is_known = self.process.watch or self._written or self.replicas.observer.gateway_aside
            if (
                names is not None
                and not is_known
                and not self.layout.run_dir(process.NAME).exists()
            ):
                return  # this home has no gateway
            await self._look_aside()
            backends = await self._backends(names)
            if not backends and await self._stop_if_unused():
                self._written = {}
                return
            await self._held.start()
            await asyncio.to_thread(self._files.write, backends.values())
            self._written = backends
            self._has_written.set()
            self._has_written = asyncio.Event()
            await self.process.follow()

    async def _look_aside(self) -> None:
        """Degrade the environments behind a gateway whose run file cannot be used."""
        found = None
        if self.process.watch is None:
            found = await asyncio.to_thread(process.set_aside, self.layout)
        if found != self.replicas.observer.gateway_aside:
            names = [e.name for e in await self._environments() if e.state in SERVING]
            await self.replicas.observer.set_gateway_aside(found, names)

    async def _is_wanted(self) -> bool:
        """Return whether an environment, or a generation that starts or drains, is behind it."""
        generations = await self.store.read(queries.UNSETTLED_GENERATIONS)
        return any(g.spec.get("gateway") for g in generations) or bool(await self._environments())

    async def _environments(self) -> list[Environment]:
        """The environments that have their address at the gateway."""
        found = await self.store.read(queries.NOT_STOPPED)
        return [each for each in found if _is_at_gateway(each)]

    async def _backends(self, names: Collection[str] | None) -> dict[str, Backend]:
        """Return Envoy's configuration of each environment, by name; only these are read again."""
        if names is None:
            found, wanted = {}, await self._environments()
        else:
            found = {name: each for name, each in self._written.items() if name not in names}
            rows = [await self.store.read(queries.environment(name)) for name in names]
            wanted = [row for row in rows if row is not None and _is_at_gateway(row)]
        holding, watched = str(self._held.path), self.replicas.watches.of
        found |= {e.name: backend_of(e, watched(e.name), holding) for e in wanted}
        return dict(sorted(found.items()))

    def note(self, name: str) -> None:
        """Write which replicas of an environment are full, soon, if others are than before."""
        if name in self._written and name not in self._noted:
            self._noted.add(name)
            asyncio.get_running_loop().call_later(FULL_SECONDS, self._update_full, name)

    def _update_full(self, name: str) -> None:
        self._noted.discard(name)
        written = self._written.get(name)
        if written is not None and written.full != _full(self.replicas.watches.of(name)):
            self.tasks.spawn(self._reconcile_insistently({name}), f"mark full replicas of {name}")

    async def until_served(self, name: str) -> str | None:
        """Return None once Envoy has a replica that takes sessions; otherwise why it has none."""
        well_at = time.monotonic()  # when it last had no problem that keeps replicas from starting
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                while (backend := self._written.get(name)) is not None:
                    if backend.takes_sessions:
                        if await self._until_seen(name, _is_reached):
                            return None
                    else:
                        now = time.monotonic()
                        problem = _common_problem(self.replicas.watches.of(name))
                        well_at = now if problem is None else well_at
                        if now - well_at >= PATIENCE_SECONDS:
                            return f"{name} has no replica: {problem}."
                        # For a limited time: the notification can be lost.
                        with anyio.move_on_after(CHANGE_POLL_INTERVAL_SECONDS):
                            await self._has_written.wait()
        except TimeoutError:
            return f"No replica of {name} was ready within {HOLD_SECONDS:g} s."
        environment = await self.store.read(queries.environment(name))
        error = None if environment is None else environment.error
        why = "" if error is None else f": {error.message}"
        return f"{name} has no replica{why}."

    async def _until_seen(
        self, name: str, answer: Callable[[Backend | None, Seen], bool | None]
    ) -> bool:
        """Poll Envoy until `answer` is not None, given what it should know, and what it knows."""
        while True:
            seen = await self._look()
            own = None if seen is None else [each for each in seen if each.environment == name]
            if (found := answer(self._written.get(name), own)) is not None:
                return found
            await asyncio.sleep(ENVOY_POLL_INTERVAL_SECONDS)

    async def _look(self) -> Seen:
        """Return what Envoy knows of all endpoints; callers share the next answer that begins."""
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_next())
        return await asyncio.shield(self._next_look)

    async def _look_next(self) -> Seen:
        async with self._looking:
            self._next_look = None  # who asks from now on must not get what was seen before
            return await asyncio.to_thread(_statuses, self.layout)

    async def _stop_if_unused(self) -> bool:
        """Stop the gateway unless something wants it; return whether there is none."""
        if self.process.watch is None and not self.layout.run_dir(process.NAME).exists():
            return True
        if await self._is_wanted():
            return False
        async with process.locked_async(self.layout):
            # A launch that began meanwhile had its row before it asked for the lock.
            if await self._is_wanted():
                return False
            await self._held.stop()
            await self.process.stop()
        log.info("the gateway was stopped: no environment wants it")
        return True


async def _log_state(replica: Replica) -> None:
    log.info("the gateway is %s", replica.state.value, extra={"pid": replica.pid})


async def gateway_problem(layout: Layout) -> str | None:
    """Return why clients may be refused by the gateway that runs; None where it has room."""
    found = await asyncio.to_thread(process.read_gateway, layout)
    with contextlib.suppress(OSError):  # it is being started again, as its exits tell
        return None if found is None else (await asyncio.to_thread(found.connections)).problem
    return None


def backend_of(
    environment: Environment,
    watches: Iterable[ReplicaWatch],
    holding_socket: str | None = None,
) -> Backend:
    """Return the gateway's configuration of an environment, from the states of its replicas."""
    found = sorted(watches, key=lambda watch: watch.run_file.number)
    full = _full(found)
    serving = [
        watch
        for watch in found
        if watch.replica.state in _SERVING
        and (watch.is_kept.is_set() or _is_first(watch, environment))
        and not watch.status.get("held")
    ]
    endpoints = tuple(
        Endpoint(
            watch.run_file.number,
            *watch.endpoint,
            is_draining=_is_draining(watch),
            is_full=watch.run_file.number in full,
            generation=watch.run_file.request_id,
            replica=watch.run_file.replica_id,
        )
        for watch in serving
    )
    # Health checks send the token, too: with an older one, replicas of an update are not healthy.
    newest = max(
        serving or found, key=lambda w: (not _is_draining(w), w.run_file.created_at), default=None
    )
    token = None if newest is None else newest.run_file.token
    wants_token = environment.spec.get("token") or not is_loopback(
        environment.spec.get("host") or LOOPBACK
    )
    if wants_token and token is None:
        holding_socket = None  # the run files with the token are gone: no replica can be admitted
    # Upstream's own server, in an image or as it is, has only `/health`.
    is_ours = environment.spec.get("provider", "local") == "local"
    path = "/capacity" if is_ours and not environment.spec.get("serve_as_is") else "/health"
    return Backend(environment.name, endpoints, token, path, holding_socket)


def _is_draining(watch: ReplicaWatch) -> bool:
    return watch.is_draining or watch.replica.state is ReplicaState.DRAINING


def _is_first(watch: ReplicaWatch, environment: Environment) -> bool:
    """Return whether a launch has started a replica for an environment that had none."""
    is_of_launch = "started_by" not in watch.run_file.data
    return is_of_launch and watch.request_id == environment.request_id


def _full(watches: Iterable[ReplicaWatch]) -> set[int]:
    """Return the replicas that are full for Envoy; none if a handshake can ask all replicas.

    Half a second later a full one may have room again, and Envoy does not ask it while another is
    healthy. A replica counts once it may get sessions, and has reported how many.
    """
    room = {
        watch.run_file.number: most - watch.sessions
        for watch in watches
        if watch.replica.state is ReplicaState.READY and not watch.status.get("held")
        if (most := watch.max_sessions)
    }
    return {number for number, left in room.items() if left <= 0 and len(room) > MAX_ASKED}


def _is_reached(backend: Backend | None, seen: Seen) -> bool | None:
    """Return whether Envoy has a replica that takes sessions; None: not yet."""
    if backend is None or not backend.takes_sessions:
        return False
    addresses = {each.address for each in backend.endpoints}
    taking = (e for e in seen or () if e.is_healthy and not e.is_draining)
    return True if any(each.address in addresses for each in taking) else None


def _has_left(backend: Backend | None, seen: Seen) -> bool | None:
    """Return whether Envoy sends nothing new to draining replicas, or is silent; None: not yet."""
    if backend is None:
        return True
    taking = {each.address for each in backend.endpoints if not each.is_draining}
    return True if all(e.is_draining for e in seen or () if e.address not in taking) else None


def _statuses(layout: Layout) -> Seen:
    found = process.read_gateway(layout)
    try:
        return [] if found is None else envoy.endpoint_statuses(found.admin_socket)
    except OSError:
        return None


def _environments_in(events: Iterable[Event]) -> set[str]:
    """The environments that events name; a request's own events change none of what is read."""
    own = (event for event in events if not event.kind.startswith("request."))
    return {event.environment for event in own if event.environment is not None}


def _is_at_gateway(environment: Environment) -> bool:
    return environment.state.is_live and bool(environment.spec.get("gateway"))


def _common_problem(watched: Iterable[ReplicaWatch]) -> str | None:
    """Return why none of an environment's replicas can start; None if one can, as far as known."""
    found = [each.status.get("problem") or each.status.get("failed") for each in watched]
    return str(found[0]).rstrip(".") if found and all(found) else None
