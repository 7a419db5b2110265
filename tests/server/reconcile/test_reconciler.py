# SPDX-License-Identifier: Apache-2.0
"""The reconciler, with the real tables and real shims: what it makes of every end."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from openenvd.environments import replica_policy, run_files, strays
from openenvd.environments.engines import providers
from openenvd.environments.gateway import process
from openenvd.environments.gateway.configuration import GatewayOptions
from openenvd.environments.gateway.process import config_folder
from openenvd.environments.shim.client import Fork, ShimClient, ShimGone, read_status_file
from openenvd.environments.shim.files import RUN_FILE_NAME, STATUS_FILE_NAME, write_json
from openenvd.environments.sources.program import HOST_PROGRAM
from openenvd.requests_db import records
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.connections import WriteConnection
from openenvd.requests_db.errors import DatabaseFull
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import dispatching, observing, submitting
from openenvd.schema.errors import EngineFailed, GatewayFailed
from openenvd.schema.layout import Layout
from openenvd.schema.replica import WAITING
from openenvd.schema.settings import Paths
from openenvd.schema.states import EnvironmentState, ErrorKind, ReplicaState, RequestState, Schedule
from openenvd.server import events
from openenvd.server.api.views import environment_view, replica_view
from openenvd.server.events import EventBus
from openenvd.server.operations.base import OperationContext
from openenvd.server.reconcile import replacing, replica_watch, replicas, status_writer, work_queue
from openenvd.server.reconcile.own_requests import Submit
from openenvd.server.reconcile.reconciler import Reconciler
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.text.json_lines import decode_line

from ...environments.shim.conftest import Replica as ShimmedServer
from ..conftest import WAIT_SECONDS, until

S = EnvironmentState
ADDRESS = "http://127.0.0.1:21000"


async def submit_nothing(*_asked: object) -> None:
    """Record the requests that the daemon submits itself."""


class World:
    """What surrounds a reconciler: a queue whose requests end as told, and kept servers."""

    def __init__(
        self, paths: Paths, store: AsyncStore, dispatch: WriteConnection, bus: EventBus
    ) -> None:
        self.paths = paths
        self.store = store
        self.dispatch = dispatch
        self.bus = bus
        self.servers: list[ShimmedServer] = []
        self.reconcilers: list[Reconciler] = []
        self.submit: Submit = submit_nothing
        self.fork: Fork | None = None

    async def reconcile(self) -> Reconciler:
        made = Reconciler(self.store, self.bus, self.paths, submit=self.submit, fork=self.fork)
        self.reconcilers.append(made)
        await made.start()
        return made

    # Requests.

    async def launch(self, name: str = "trial", **more: Any) -> records.Request:
        now = time.time()
        payload = {"source": "echo", "drain_timeout_seconds": 600.0, **more}
        environment = records.Environment(name, payload, S.PENDING, now, now)
        return await self._run("launch", Schedule.LONG, name, environment, **payload)

    async def down(self, name: str = "trial") -> records.Request:
        await self.store.write(observing.set_environment_state, name, S.STOPPING, now=time.time())
        return await self._run("down", Schedule.SHORT, name, None)

    async def carry_out(self, down: records.Request) -> list[str]:
        """What the daemon does of a `down`; the ids of what it has stopped."""
        context = OperationContext(down.id, self.paths.home, lambda _: None, lambda _: None)
        result = await self.reconcilers[-1].changes.carry_out(down, context)
        return list(result["stopped"])

    async def ends(self, request: records.Request, state: RequestState, **how: Any) -> None:
        outcome = records.Outcome(request.id, state, time.time(), **how)
        self.bus.publish(
            await asyncio.to_thread(self.dispatch.write, dispatching.record, outcomes=[outcome])
        )

    async def succeeds(self, request: records.Request) -> None:
        result = {"environment": {"name": request.environment, "address": ADDRESS}}
        await self.ends(request, RequestState.SUCCEEDED, result=result)

    async def fails(self, request: records.Request, message: str) -> None:
        error = records.RequestError(ErrorKind.OPERATION_ERROR, message)
        await self.ends(request, RequestState.FAILED, error=error)

    async def progresses(self, request: records.Request, data: dict[str, Any]) -> None:
        row = (request.id, data, time.time())
        self.bus.publish(
            await asyncio.to_thread(self.dispatch.write, dispatching.record, progress=[row])
        )

    async def _run(
        self,
        operation: str,
        schedule: Schedule,
        name: str,
        environment: records.Environment | None,
        **payload: Any,
    ) -> records.Request:
        new = records.NewRequest(operation, schedule, {"name": name, **payload}, environment=name)
        result = await self.store.write(
            submitting.submit, new, environment=environment, now=time.time()
        )
        assert isinstance(result, records.Submitted)
        self.bus.publish(result.events)
        claim = await asyncio.to_thread(
            self.dispatch.write, dispatching.claim, schedule, 1, time.time()
        )
        self.bus.publish(claim.events)
        assert claim.requests[0].id == result.request.id
        return claim.requests[0]

    async def change(self, operation: str, **payload: Any) -> records.Request:
        return await self._run(operation, Schedule.LONG, "trial", None, **payload)

    # Replicas.

    def start(self, launch: records.Request, ordinal: int = 0, **changes: Any) -> ShimmedServer:
        """A replica of this launch that is ready, as the launch's worker would start it."""
        replica_id = f"{launch.environment}-{ordinal}-{launch.id}"
        folder = self.paths.home.parent / f"{ordinal}-{launch.id}-{len(self.servers)}"
        identity = {
            "replica_id": replica_id,
            "environment": launch.environment,
            "ordinal": ordinal,
            "request_id": launch.id,
        }
        server = ShimmedServer(folder, **identity, **changes)
        server.run_dir = self.paths.runs / replica_id
        self.servers.append(server)
        return server.ready()

    async def started(
        self, launch: records.Request, ordinal: int = 0, **changes: Any
    ) -> ShimmedServer:
        server = await asyncio.to_thread(self.start, launch, ordinal, **changes)
        if self.reconcilers:
            await self.reconcilers[-1].replicas.adopt(str(launch.environment), launch.id)
        return server

    def out_of_reach(self, launch: records.Request, ordinal: int = 0) -> Path:
        """The run folder of a replica of this launch, whose engine does not answer."""
        run_dir = self.paths.runs / f"trial-{ordinal}-{launch.id}"
        run_dir.mkdir(parents=True)
        run = {"version": run_files.RUN_FILE_VERSION, "replica_id": run_dir.name}
        run |= {"environment": "trial", "request_id": launch.id, "provider": "nowhere"}
        run |= {"run_dir": str(run_dir), "socket_path": str(run_dir / "socket"), "port": 0}
        run |= {"number": ordinal, "created_at": time.time(), "host": "127.0.0.1", "log_path": ""}
        (run_dir / RUN_FILE_NAME).write_text(json.dumps(run | {"ordinal": ordinal}))
        return run_dir

    async def serving(self, name: str = "trial", replicas: int = 1) -> list[ShimmedServer]:
        """An environment whose launch succeeded, and which a reconciler has found READY."""
        if not self.reconcilers:
            await self.reconcile()
        launch = await self.launch(name)
        servers = [await self.started(launch, ordinal) for ordinal in range(replicas)]
        await self.succeeds(launch)
        await self.becomes(S.READY, name)
        return servers

    async def updating(self, **more: Any) -> tuple[records.Request, ShimmedServer]:
        """A launch of a name that runs, and its replica, which is held."""
        update = await self.launch(**more)
        assert update.payload["replaces"] is not None
        return update, await self.started(update, held=True)

    async def takes_over(self, update: records.Request) -> None:
        """An update serves from now on, and its request has succeeded."""
        found = await self.store.read(queries.generations("trial"))
        [own] = [each for each in found if each.request_id == update.id]
        observer = self.reconcilers[-1].replicas.observer  # nothing is written that it read before
        assert await observer.switch(own, update.payload, ADDRESS)
        await self.succeeds(update)

    async def generations(self) -> dict[int, str]:
        found = await self.store.read(queries.generations("trial"))
        return {each.number: each.state.value for each in found}

    async def generations_become(self, **states: str) -> None:
        """`g1="RETIRED"`: the first is."""
        wanted = {int(key[1:]): state for key, state in states.items()}

        async def holds() -> bool:
            return await self.generations() == wanted

        await until(self.bus, holds)

    # Looking.

    async def until(self, check: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not check():
                await asyncio.sleep(0.01)

    async def gone(self, server: ShimmedServer) -> None:
        await self.until(lambda: not server.run_dir.exists())

    async def rows(self, name: str = "trial") -> dict[str, ReplicaState]:
        return {row.id: row.state for row in await self.store.read(queries.replicas(name))}

    async def launched(self) -> records.Request:
        found = await self.store.read(queries.get(str((await self.environment()).request_id)))
        assert isinstance(found, records.Request)
        return found

    async def environment(self, name: str = "trial") -> records.Environment:
        found = await self.store.read(queries.environment(name))
        assert found is not None
        return found

    async def becomes(
        self, state: EnvironmentState, name: str = "trial", *, is_explained: bool = False
    ) -> records.Environment:
        async def holds() -> bool:
            found = await self.environment(name)
            return found.state is state and not (is_explained and found.error is None)

        await until(self.bus, holds)
        return await self.environment(name)

    async def replica(self, name: str = "trial") -> records.Replica:
        [found] = await self.store.read(queries.replicas(name))
        return found

    async def replica_becomes(self, state: ReplicaState, **fields: Any) -> records.Replica:
        known, found = {"state": state, **fields}, list[records.Replica]()

        async def holds() -> bool:
            rows = await self.store.read(queries.replicas("trial"))
            found[:] = [r for r in rows if all(getattr(r, k) == v for k, v in known.items())]
            return bool(found)

        await until(self.bus, holds)
        return found[0]


@pytest.fixture
async def world(
    paths: Paths, store: AsyncStore, dispatch: WriteConnection, bus: EventBus
) -> AsyncIterator[World]:
    made = World(paths, store, dispatch, bus)
    yield made
    for reconciler in made.reconcilers:
        await reconciler.stop()
    for server in made.servers:
        await asyncio.to_thread(server.close)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_policy, "FIRST_PAUSE_SECONDS", 0.01)


def pid_of(server: ShimmedServer) -> int:
    pid = server.link.status["pid"]
    assert pid is not None
    return pid


def shim_pid(server: ShimmedServer) -> int:
    status = read_status_file(server.run_dir)
    assert status is not None
    pid: int = status["shim"]["pid"]
    return pid


def is_running(server: ShimmedServer) -> bool:
    status: Any = server.link.status
    return ProcessIdentity(status["pid"], status["pid_started_at"]).is_alive()


# A launch and its ends.


@pytest.mark.parametrize("end", [RequestState.FAILED, RequestState.CANCELLED])
async def test_a_launch_that_failed_or_was_cancelled_leaves_nothing_running_and_says_why(
    world: World, end: RequestState
) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    if end is RequestState.FAILED:
        await world.fails(launch, "no such folder")
        environment = await world.becomes(S.FAILED)
        assert environment.error is not None
        assert environment.error.message == "no such folder"
    else:
        await world.ends(launch, end)
        await world.becomes(S.STOPPED)
    assert not server.run_dir.exists()
    assert not is_running(server)


async def test_replicas_that_a_launch_leaves_after_the_down_are_stopped(world: World) -> None:
    await world.reconcile()
    launch = await world.launch()
    await world.succeeds(await world.down())
    await world.becomes(S.STOPPED)
    server = await asyncio.to_thread(world.start, launch)
    await world.ends(launch, RequestState.CANCELLED)
    await asyncio.to_thread(server.wait_for_end)
    await world.gone(server)


# Deaths.


async def test_a_replica_is_shown_and_not_started_again_while_its_launch_is_responsible(
    world: World, impatient: None
) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    assert (await world.environment()).state is S.STARTING
    os.kill(pid_of(server), signal.SIGKILL)
    await asyncio.to_thread(server.wait_state, "exited")
    await world.fails(launch, "it died")
    await world.becomes(S.FAILED)
    await asyncio.to_thread(server.wait_for_end)
    assert server.link.status["generation"] == 1


async def test_a_killed_shim_is_replaced_on_its_run_file(world: World) -> None:
    reconciler = await world.reconcile()
    [server] = await world.serving()
    first, shim = pid_of(server), shim_pid(server)
    os.kill(shim, signal.SIGKILL)
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)
    replica = await world.replica()
    assert replica.pid != first
    why = f"ended with its shim (pid {shim}), which was killed or crashed"
    assert replica_view(replica, None)["message"] == f"its previous server {why}"
    [told] = reconciler.replicas.live[replica.id]["exits"]
    assert (told["pid"], told["reason"]["evidence"]) == (first, why)
    assert replica.restarts == 1
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)  # the new shim counts it as its first
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)
    assert (await world.replica()).restarts == 2


async def test_a_replica_whose_port_was_taken_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for is said, and is no exit: its budget is not spent."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(replica_watch, "SHIM_POLL_INTERVAL_SECONDS", 0.01)
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch, port=port)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(shim_pid(server), signal.SIGKILL)
    await world.until(lambda: not is_running(server))
    with socket.create_server(("127.0.0.1", port)):
        await world.succeeds(launch)

        async def waits() -> bool:
            return WAITING in ((await world.replica()).exit or {})

        await until(world.bus, waits)
        replica = await world.replica()
        assert replica.state is ReplicaState.BACKING_OFF
        assert replica.exit is not None
        assert f"port {port} is in use by" in replica.exit[WAITING]
        assert f"(pid {os.getpid()})" in (replica_view(replica, None)["message"])
        await asyncio.sleep(0.5)  # many tries, more than the budget has
    await world.becomes(S.READY)
    with socket.create_connection(("127.0.0.1", port)):
        pass


async def test_a_replica_whose_installation_was_removed_is_started_again_from_the_present_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is removed as well, it waits, and spends no budget."""
    monkeypatch.setattr(replica_watch, "SHIM_POLL_INTERVAL_SECONDS", 0.01)
    await world.reconcile()
    launch = await world.launch()
    await world.started(launch, words=["/gone/env_host/__main__.py"])
    await world.replica_becomes(ReplicaState.READY)
    await world.succeeds(launch)
    monkeypatch.setattr(providers, "HOST_PROGRAM", Path("/gone/too"))
    os.kill(int((await world.replica()).pid or 0), signal.SIGKILL)

    async def waits() -> bool:
        return "was removed or moved" in ((await world.replica()).exit or {}).get(WAITING, "")

    await until(world.bus, waits)
    assert (await world.replica()).state is ReplicaState.BACKING_OFF
    monkeypatch.setattr(providers, "HOST_PROGRAM", HOST_PROGRAM)
    await world.becomes(S.READY)
    assert run_files.of_environment(world.paths.runs, "trial")[0].data["argv"][-1] == str(
        HOST_PROGRAM
    )


def changed(run: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(run | changes).encode()


# What may become of a run file, made of what it was.
UNUSABLE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda run: b"",
    "cut": lambda run: json.dumps(run).encode()[:-20],
    "no text": lambda run: b"\xff\x00" * 40,
    "another value": lambda run: b"[1]",
    "too deep": lambda run: b"[" * 100_000,
    "a field is gone": lambda run: changed(run, created_at=None),
    "a field of another type": lambda run: changed(run, socket_path=7),
    "no version": lambda run: changed(run, version=None),
    "a newer version": lambda run: changed(run, version=run_files.RUN_FILE_VERSION + 1),
    "an older version": lambda run: changed(run, version=0),
    "a version that is no number": lambda run: changed(run, version="2.1"),
}


@pytest.mark.parametrize("kind", [*UNUSABLE, "removed"])
async def test_a_run_file_that_cannot_be_used_is_named_and_its_replica_kept_until_its_down(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    launch, server = await unwatched(world, "empty" if kind == "removed" else kind)
    if kind == "removed":
        (server.run_dir / RUN_FILE_NAME).unlink()
    whole = await asyncio.to_thread(world.start, launch, 1)
    reconciler = await world.reconcile()
    path = server.run_dir / RUN_FILE_NAME
    await world.replica_becomes(ReplicaState.READY, id=whole.run_dir.name)
    environment = await world.becomes(S.DEGRADED)
    assert environment.error is not None
    rows = await world.store.read(queries.replicas("trial"))
    view = environment_view(environment, rows, reconciler.replicas.live)
    assert [each["state"] for each in view["replicas"]] == ["UNKNOWN", ReplicaState.READY]
    why = "is damaged" if kind in list(UNUSABLE)[:8] else "was written by another version"
    why = "was removed" if kind == "removed" else why
    for text in (view["error"]["message"], view["replicas"][0]["message"], caplog.text):
        assert f"its run file {path} {why}" in text
        assert "openenv down trial ends it" in text
    assert view["error"]["hint"].startswith("openenv down trial, then launch it again")
    assert is_running(server)
    assert reconciler.leftovers.strays == []
    down = await world.down()
    stopped = await world.carry_out(down)
    assert set(stopped) == {server.run_dir.name, whole.run_dir.name}
    assert not is_running(server)
    await world.ends(down, RequestState.SUCCEEDED)
    await world.becomes(S.STOPPED)
    assert not server.run_dir.exists()
    assert not Path(server.run_file["socket_path"]).exists()


async def test_a_damaged_run_file_whose_shim_was_killed_is_cleaned_up_after_by_down(
    world: World,
) -> None:
    _, server = await unwatched(world, "empty")
    os.kill(shim_pid(server), signal.SIGKILL)
    await asyncio.to_thread(run_files.stop_environment, world.paths.runs, "trial", 1.0)
    assert not server.run_dir.exists()


@pytest.mark.parametrize("kind", ["empty", "a newer version"])
async def test_a_down_that_cannot_end_what_was_set_aside_says_so_until_somebody_else_has(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a replica on an engine, whose agent is gone."""
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.1)
    launch = await world.launch()
    run_dir = world.out_of_reach(launch)
    await world.progresses(launch, {"replica": {"id": run_dir.name}})
    await world.succeeds(launch)
    whole = json.loads((run_dir / RUN_FILE_NAME).read_bytes())
    (run_dir / RUN_FILE_NAME).write_bytes(UNUSABLE[kind](whole))
    monkeypatch.setattr(work_queue, "RETRY_SECONDS", 0.01)
    await world.reconcile()
    down = await world.down()
    with pytest.raises(EngineFailed, match="cannot be stopped: its run file") as caught:
        await world.carry_out(down)
    assert caught.value.hint is not None
    assert f"remove the folder {run_dir}" in caught.value.hint
    await world.fails(down, caught.value.message)
    await asyncio.sleep(0.1)  # in which the reconciler tries again
    assert (await world.environment()).state is S.STOPPING
    await asyncio.to_thread(shutil.rmtree, run_dir)
    await world.becomes(S.STOPPED)


@pytest.mark.parametrize("kind", ["cut", "a field is gone", "a newer version"])
async def test_a_gateway_whose_run_file_cannot_be_used_is_named_and_kept_until_nothing_wants_it(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    layout, anywhere = Layout(world.paths.home), GatewayOptions("127.0.0.1", 0)
    gateway = await asyncio.to_thread(process.ensure_running, layout, anywhere)
    path = gateway.run_file.run_dir / RUN_FILE_NAME
    path.write_bytes(UNUSABLE[kind](json.loads(path.read_bytes())))
    launch = await world.launch(gateway=True)
    reconciler = await world.reconcile()
    await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    await world.succeeds(launch)
    environment = await world.becomes(S.DEGRADED)
    shown = await reconciler.gateway.status()
    with pytest.raises(GatewayFailed) as refused:
        await asyncio.to_thread(process.ensure_running, layout, anywhere)
    assert environment.error is not None
    assert environment.error.hint == refused.value.hint
    said = (environment.error.message, shown["gateway"]["problem"], refused.value.message)
    assert all(f"its run file {path} " in text for text in (*said, caplog.text))
    with ShimClient.connect(gateway.run_file.socket_path) as link:
        assert link.status["state"] == "ready"
    down = await world.down()
    await world.carry_out(down)
    await world.ends(down, RequestState.SUCCEEDED)
    await world.becomes(S.STOPPED)
    while path.exists():
        await asyncio.sleep(0.05)
    with pytest.raises(ShimGone):
        ShimClient.connect(gateway.run_file.socket_path)


async def test_what_was_set_aside_and_no_table_knows_is_a_stray_that_can_be_stopped(
    world: World,
) -> None:
    launch = unknown_launch()
    server = await asyncio.to_thread(start_at_its_own_socket, world, launch)
    (server.run_dir / RUN_FILE_NAME).write_bytes(b"{}")
    reconciler = await world.reconcile()
    [stray] = [strays.stray_of(each) for each in reconciler.leftovers.strays]
    assert stray["id"] == server.run_dir.name
    assert "is damaged" in stray["problem"]
    assert is_running(server)
    await asyncio.to_thread(strays.stop_stray, Layout(world.paths.home), stray)
    assert not is_running(server)
    assert not server.run_dir.exists()


async def unwatched(world: World, kind: str) -> tuple[records.Request, ShimmedServer]:
    """An environment that serves, and that no daemon watches; its run file cannot be used."""
    earlier = await world.reconcile()
    launch = await world.launch()
    server = await asyncio.to_thread(start_at_its_own_socket, world, launch)
    await world.progresses(launch, {"replica": {"id": server.run_dir.name}})
    await world.succeeds(launch)
    await world.becomes(S.READY)
    await earlier.stop()
    path = server.run_dir / RUN_FILE_NAME
    path.write_bytes(UNUSABLE[kind](json.loads(path.read_bytes())))
    return launch, server


def start_at_its_own_socket(world: World, launch: records.Request) -> ShimmedServer:
    replica_id = f"trial-0-{launch.id}"
    return world.start(launch, socket_path=str(world.paths.replica_socket(replica_id)))


async def test_replicas_stopped_from_outside_fail_their_environment_with_a_reason(
    world: World,
) -> None:
    [server] = await world.serving()
    server.link.send("stop", grace_seconds=1.0)
    environment = await world.becomes(S.FAILED)
    assert environment.error is not None
    assert "trial" in environment.error.message


# Taking down.


async def test_nothing_is_started_again_while_its_environment_is_taken_down(
    world: World, impatient: None
) -> None:
    reconciler = await world.reconcile()
    [server] = await world.serving()
    down = await world.down()
    [watch] = reconciler.replicas.watches.of("trial")
    await world.until(lambda: not watch.is_kept.is_set())
    server.tell("exit 0")
    await asyncio.to_thread(server.wait_state, "exited")
    await world.succeeds(down)
    await world.becomes(S.STOPPED)
    await asyncio.to_thread(server.wait_for_end)
    assert server.link.status["generation"] == 1


async def test_a_down_that_failed_is_finished_by_the_reconciler_as_soon_as_that_is_possible(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 2

    def stop(*args: Any, **given: Any) -> Any:
        nonlocal refusals
        if refusals > 0:
            refusals -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return original(*args, **given)

    monkeypatch.setattr(work_queue, "RETRY_SECONDS", 0.01)
    await world.reconcile()
    [server] = await world.serving()
    original = run_files.stop_environment
    monkeypatch.setattr(run_files, "stop_environment", stop)
    await world.fails(await world.down(), "its worker was killed")
    await world.becomes(S.STOPPED)
    assert (refusals, is_running(server), server.run_dir.exists()) == (0, False, False)


async def test_an_environment_that_is_slow_to_stop_does_not_delay_another(world: World) -> None:
    await world.reconcile()
    launch = await world.launch("stubborn")
    server = await world.started(launch)
    server.tell("ignore_sigterm")
    await asyncio.to_thread(server.wait, lambda s: s["sessions"] == 99)
    await world.fails(launch, "no")
    await world.serving("other")
    assert (await world.environment("stubborn")).state is S.STARTING
    os.kill(pid_of(server), signal.SIGKILL)
    await world.becomes(S.FAILED, "stubborn")


# Other daemons, other days.


async def test_the_second_attempt_of_a_launch_is_adopted_however_the_first_ended(
    world: World,
) -> None:
    launch = await world.launch()
    replica_id = f"trial-0-{launch.id}"
    run_dir = str(world.paths.runs / replica_id)
    stopped = records.Replica(replica_id, "trial", 0, "local", ReplicaState.STOPPED, run_dir, 1.0)
    await world.store.write(observing.upsert_replica, stopped, now=1.0)
    await world.reconcile()
    await world.started(launch)
    await world.succeeds(launch)
    await world.becomes(S.READY)


@pytest.fixture
def read_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose run files were read."""
    read, look_at = list[str](), run_files.look_at

    def note(run_dir: Path, *version: Any) -> object:
        read.append(run_dir.name)
        return look_at(run_dir, *version)

    monkeypatch.setattr(run_files, "look_at", note)
    return read


async def test_a_daemon_that_starts_reads_each_run_file_once_and_writes_nothing_again(
    world: World, monkeypatch: pytest.MonkeyPatch, read_folders: list[str]
) -> None:
    for name in ("trial", "other"):
        await world.serving(name, replicas=2)
    await world.reconcilers.pop().stop()
    writes, write = list[str](), world.store.write

    async def note(work: Callable[..., Any], *args: Any, **more: Any) -> Any:
        writes.append(work.__name__)
        return await write(work, *args, **more)

    monkeypatch.setattr(world.store, "write", note)
    read_folders.clear()
    await world.reconcile()
    replicas = sorted(folder for folder in read_folders if folder != process.NAME)
    assert replicas == sorted(server.run_file["replica_id"] for server in world.servers)
    assert writes == []


async def test_a_request_that_changes_an_environment_reads_no_run_file_of_its_replicas(
    world: World, read_folders: list[str]
) -> None:
    await world.serving(replicas=2)
    manager = world.reconcilers[-1].replicas
    await world.until(lambda: all(watch.is_followed for watch in manager.watches.of("trial")))
    read_folders.clear()
    await world.reconcilers[-1].reconcile("trial")
    serving = manager.watches.that_serves("trial")
    assert read_folders == []
    assert serving == run_files.that_serves(world.paths.runs, "trial")


async def test_replicas_that_change_at_once_are_observed_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.serving()
    observer, observed = world.reconcilers[-1].replicas.observer, list[str]()
    states = queries.replica_states

    def note(name: str) -> queries.Query[dict[str, ReplicaState]]:
        observed.append(name)
        return states(name)

    monkeypatch.setattr(queries, "replica_states", note)
    await asyncio.gather(*(observer.observe("trial") for _ in range(100)))
    assert len(observed) == 2  # for the first, which had begun, and for all others


async def test_the_second_attempt_of_a_launch_is_watched_instead_of_the_first(
    world: World,
) -> None:
    reconciler = await world.reconcile()
    launch = await world.launch()
    first = await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(pid_of(first), signal.SIGKILL)  # and its worker is killed, too
    await asyncio.to_thread(first.wait_state, "exited")
    await asyncio.to_thread(run_files.stop_environment, world.paths.runs, "trial")
    second = await world.started(launch, created_at=2.0)
    await world.succeeds(launch)
    await world.becomes(S.READY)
    pid = reconciler.replicas.live[second.run_file["replica_id"]]["pid"]
    assert (await world.replica()).pid == pid == pid_of(second)


def unknown_launch(name: str = "trial") -> records.Request:
    now = time.time()
    return records.Request("ab" * 8, "launch", Schedule.LONG, {}, RequestState.SUCCEEDED, now, name)


@pytest.mark.parametrize("state", [S.READY, S.STOPPED])
async def test_an_old_copy_of_the_database_adopts_what_was_launched_since(
    world: World, state: EnvironmentState
) -> None:
    await world.succeeds(await world.launch())  # whose replicas have gone since
    await world.store.write(observing.set_environment_state, "trial", state, now=time.time())
    since = unknown_launch()
    server = await asyncio.to_thread(world.start, since)
    await world.reconcile()
    environment = await world.becomes(S.READY)
    assert environment.request_id == since.id
    assert (await world.replica()).pid == pid_of(server)


async def test_a_launch_that_no_table_knows_is_a_stray_where_its_name_is_taken(
    world: World,
) -> None:
    earlier = await world.reconcile()
    [server] = await world.serving()
    await earlier.stop()
    stray = await asyncio.to_thread(world.start, unknown_launch())
    reconciler = await world.reconcile()
    assert [each.replica_id for each in reconciler.leftovers.strays] == [stray.run_dir.name]
    assert is_running(stray)
    assert is_running(server)
    assert (await world.environment()).request_id == server.run_file["request_id"]


async def test_what_an_engine_that_does_not_answer_has_does_not_keep_a_daemon_from_starting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.1)
    launch = await world.launch()
    run_dir = world.out_of_reach(launch)
    await world.store.write(observing.set_environment_state, "trial", S.STOPPED, now=time.time())
    await world.reconcile()
    assert run_files.read(run_dir) is not None


async def test_replicas_that_belong_to_nothing_are_stopped_at_the_start(world: World) -> None:
    launch = await world.launch()
    server = await asyncio.to_thread(world.start, launch)
    await world.store.write(observing.set_environment_state, "trial", S.STOPPED, now=time.time())
    await world.reconcile()
    assert not server.run_dir.exists()
    assert not is_running(server)


async def test_everything_is_reconciled_after_events_were_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.reconcile()
    launch = await world.launch()
    await asyncio.to_thread(world.start, launch)
    monkeypatch.setattr(events, "MAX_WAITING_EVENTS", 1)
    noise = [records.Event(n, 1.0, "request.state", environment="nobody") for n in range(3)]
    world.bus.publish(noise)  # and no turn of the loop before:
    outcome = records.Outcome(launch.id, RequestState.SUCCEEDED, time.time(), result={})
    world.bus.publish(world.dispatch.write(dispatching.record, outcomes=[outcome]))
    await world.becomes(S.READY)


async def test_a_replica_is_restarted_once_the_full_disk_can_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 3

    async def write(work: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal refusals
        if refusals > 0 and work is observing.upsert_replica:
            refusals -= 1
            raise DatabaseFull("the disk is full")
        return await original(work, *args, **kwargs)

    monkeypatch.setattr(status_writer, "RETRY_SECONDS", 0.01)
    reconciler = await world.reconcile()
    [server] = await world.serving()
    original = world.store.write
    monkeypatch.setattr(world.store, "write", write)
    os.kill(pid_of(server), signal.SIGKILL)
    replica = await world.replica_becomes(ReplicaState.READY, restarts=1)
    assert refusals == 0
    assert reconciler.replicas.live[replica.id]["generation"] == 2  # the same shim, asked once


async def test_an_error_of_the_watch_is_not_taken_for_the_death_of_the_shim(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True

    def decode(line: bytes) -> Any:
        nonlocal broken
        if broken:
            broken = False
            raise ValueError("a line that makes no sense")
        return decode_line(line)

    monkeypatch.setattr(replica_watch, "decode_line", decode)
    monkeypatch.setattr(replica_watch, "SHIM_POLL_INTERVAL_SECONDS", 0.01)
    await world.reconcile()
    [server] = await world.serving()
    assert not broken
    assert is_running(server)
    assert (await world.replica()).restarts == 0


async def test_nothing_is_kept_of_environments_that_have_ended(world: World) -> None:
    reconciler = await world.reconcile()
    for number in range(3):
        launch = await world.launch(f"trial-{number}")
        await world.ends(launch, RequestState.CANCELLED)
        await world.becomes(S.STOPPED, f"trial-{number}")
    replicas, queue = reconciler.replicas, reconciler.queue
    assert [len(each) for each in (queue._due, replicas.watches)] == [0, 0]


# Updates.


@pytest.mark.usefixtures("impatient")
async def test_what_serves_is_restarted_during_an_update_and_what_is_to_serve_is_not(
    world: World,
) -> None:
    [old] = await world.serving()
    _, new = await world.updating()
    os.kill(pid_of(new), signal.SIGKILL)
    await asyncio.to_thread(new.wait_state, "exited")
    os.kill(pid_of(old), signal.SIGKILL)
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)
    assert new.link.status["generation"] == 1


async def test_an_environment_that_fails_during_its_update_is_mended_by_it(world: World) -> None:
    [old] = await world.serving()
    update, new = await world.updating()
    old.link.send("stop", grace_seconds=0.0)
    await world.becomes(S.FAILED)
    await world.takes_over(update)
    await world.becomes(S.READY)
    await asyncio.to_thread(new.wait, lambda status: not status["held"])
    await world.generations_become(g2="SERVING", g1="FAILED")


async def test_what_was_read_of_a_generation_is_not_written_of_the_one_that_takes_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = (await world.reconcile()).replicas
    [old] = await world.serving()
    update, _ = await world.updating()
    [generation, _] = await world.store.read(queries.generations("trial"))
    has_read, goes_on, move = asyncio.Event(), asyncio.Event(), manager.status.set_environment

    async def set_environment(*args: Any, **more: Any) -> None:
        has_read.set()
        await goes_on.wait()
        await move(*args, **more)

    monkeypatch.setattr(manager.status, "set_environment", set_environment)
    old.link.send("stop", grace_seconds=0.0)
    await has_read.wait()
    switching = asyncio.create_task(manager.observer.switch(generation, update.payload, ADDRESS))
    await asyncio.wait([switching], timeout=0.5)
    goes_on.set()
    await switching
    assert await world.generations() == {2: "SERVING", 1: "FAILED"}


async def test_an_update_that_is_ready_when_its_environment_is_taken_down_is_removed(
    world: World,
) -> None:
    await world.serving()
    update, new = await world.updating()
    down = await world.down()
    await world.succeeds(update)
    await world.generations_become(g2="FAILED", g1="SERVING")
    await world.succeeds(down)
    await world.generations_become(g2="FAILED", g1="RETIRED")
    assert not is_running(new)


@pytest.mark.parametrize("is_killed", [False, True], ids=["the same daemon", "the next one"])
async def test_what_was_replaced_is_stopped_when_its_engine_answers_again(
    world: World, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    has_failed, loop = asyncio.Event(), asyncio.get_running_loop()
    original = run_files.stop_replicas

    def stop_replicas(*args: Any) -> None:
        try:
            original(*args)
        finally:
            loop.call_soon_threadsafe(has_failed.set)

    monkeypatch.setattr(run_files, "stop_replicas", stop_replicas)
    monkeypatch.setattr(run_files, "_MARGIN_SECONDS", 0.1)
    monkeypatch.setattr(replacing, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(replicas, "STOP_AGAIN_SECONDS", 0.05)
    first = await world.reconcile()
    launch = await world.launch()
    old = await world.started(launch)
    run_dir = world.out_of_reach(launch, 1)
    await world.succeeds(launch)
    await world.becomes(S.DEGRADED)
    update, _ = await world.updating(drain_timeout_seconds=0.0)
    await world.takes_over(update)
    await world.becomes(S.READY)
    await asyncio.to_thread(old.wait_for_end)
    await has_failed.wait()
    assert await world.generations() == {2: "SERVING", 1: "DRAINING"}
    if is_killed:
        await first.stop()
        await world.reconcile()
    write_json(str(run_dir / STATUS_FILE_NAME), {"state": "stopped"})
    await world.generations_become(g2="SERVING", g1="RETIRED")
    assert not run_dir.exists()


async def test_of_two_generations_in_no_table_the_one_that_serves_is_adopted(world: World) -> None:
    first = await world.reconcile()
    [old] = await world.serving()
    await world.updating()
    await first.stop()
    for table in ("requests", "environments", "generations", "replicas"):
        await world.store.write(Connection.exec_driver_sql, f"DELETE FROM {table}")
    await world.reconcile()
    assert (await world.environment()).request_id == old.run_file["request_id"]


@pytest.mark.parametrize("has_gateway", [False, True], ids=["no gateway", "a gateway"])
async def test_an_event_has_the_environments_that_it_does_not_name_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, has_gateway: bool
) -> None:
    reconciler = await world.reconcile()
    folder = world.paths.run_dir(process.NAME)
    servers = {}
    for name in ("one", "two"):
        launch = await world.launch(name, gateway=has_gateway)
        if has_gateway:
            folder.mkdir(exist_ok=True)  # as its worker starts the gateway
        servers[name] = await world.started(launch)
        await world.succeeds(launch)
        await world.becomes(S.READY, name)
    read, environment, read_store = list[str](), queries.environment, AsyncStore.read

    def note(name: str) -> Any:
        read.append(name)
        return environment(name)

    async def note_all(store: AsyncStore, query: queries.Query[Any]) -> Any:
        read.extend(["all"] if query is queries.NOT_STOPPED else [])
        return await read_store(store, query)

    async def restarted(times: int) -> None:
        with world.bus.subscribe() as subscription:
            os.kill(shim_pid(servers["one"]), signal.SIGKILL)
            while (await world.replica("one")).restarts < times:
                await subscription.next()
            await world.becomes(S.READY, "one")

    await restarted(1)  # by then, all that the launches have told of has been looked at
    monkeypatch.setattr(queries, "environment", note)
    monkeypatch.setattr(AsyncStore, "read", note_all)
    await restarted(2)
    endpoints = config_folder(folder) / "endpoints"
    if has_gateway:
        await reconciler.gateway.until_left("one")
        assert sorted(path.name for path in endpoints.iterdir()) == ["one.json", "two.json"]
    else:
        assert not endpoints.exists()
    assert set(read) == {"one"}
