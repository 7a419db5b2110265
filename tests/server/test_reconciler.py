# SPDX-License-Identifier: Apache-2.0
"""The reconciler, with the real tables and real shims: what it makes of every end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import restart_policy, run_files
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.dispatch_store import DispatchStore
from openenvd.requests_db.errors import DatabaseFull
from openenvd.requests_db.records import (
    Environment,
    Event,
    NewRequest,
    Outcome,
    Replica,
    Request,
    RequestError,
)
from openenvd.requests_db.results import Submitted
from openenvd.requests_db.sql import queries
from openenvd.requests_db.states import (
    EnvironmentState,
    ErrorKind,
    ReplicaState,
    RequestState,
    Schedule,
)
from openenvd.requests_db.transactions import observing, submitting
from openenvd.server.api.views import replica_view
from openenvd.server.events.bus import EventBus
from openenvd.server.reconcile import replica_watch
from openenvd.server.reconcile.reconciler import Reconciler
from openenvd.server.reconcile.replica_watch import WAITING
from openenvd.server.reconcile.status_writer import Timing
from openenvd.server.settings import Paths
from openenvd.shim.client import read_status_file
from openenvd.system.json_lines import decode_line
from openenvd.system.process_identity import ProcessIdentity

from ..shim.conftest import Replica as ShimmedServer
from .conftest import WAIT_SECONDS, until

S = EnvironmentState
ADDRESS = "http://127.0.0.1:21000"


class World:
    """What surrounds a reconciler: a queue whose requests end as told, and kept servers."""

    def __init__(
        self, paths: Paths, store: AsyncStore, dispatch: DispatchStore, bus: EventBus
    ) -> None:
        self.paths = paths
        self.store = store
        self.dispatch = dispatch
        self.bus = bus
        self.servers: list[ShimmedServer] = []
        self.reconcilers: list[Reconciler] = []

    async def reconcile(self, timing: Timing | None = None) -> Reconciler:
        """A reconciler at work."""
        made = Reconciler(self.store, self.bus, self.paths, timing)
        self.reconcilers.append(made)
        await made.start()
        return made

    # Requests.

    async def launch(self, name: str = "trial") -> Request:
        """A launch that runs."""
        now = time.time()
        environment = Environment(name, {"source": "echo"}, S.PENDING, now, now)
        return await self._run("launch", Schedule.LONG, name, environment)

    async def down(self, name: str = "trial") -> Request:
        """A `down` that runs."""
        await self.store.write(observing.set_environment_state, name, S.STOPPING, now=time.time())
        return await self._run("down", Schedule.SHORT, name, None)

    async def ends(self, request: Request, state: RequestState, **how: Any) -> None:
        """The request ends so."""
        outcome = Outcome(request.id, state, time.time(), **how)
        self.bus.publish(await asyncio.to_thread(self.dispatch.record, outcomes=[outcome]))

    async def succeeds(self, request: Request) -> None:
        result = {"environment": {"name": request.environment, "address": ADDRESS}}
        await self.ends(request, RequestState.SUCCEEDED, result=result)

    async def fails(self, request: Request, message: str) -> None:
        error = RequestError(ErrorKind.OPERATION_ERROR, message)
        await self.ends(request, RequestState.FAILED, error=error)

    async def progresses(self, request: Request, data: dict[str, Any]) -> None:
        row = (request.id, data, time.time())
        self.bus.publish(await asyncio.to_thread(self.dispatch.record, progress=[row]))

    async def _run(
        self, operation: str, schedule: Schedule, name: str, environment: Environment | None
    ) -> Request:
        new = NewRequest(operation, schedule, {"name": name}, environment=name)
        result = await self.store.write(
            submitting.submit, new, environment=environment, now=time.time()
        )
        assert isinstance(result, Submitted)
        self.bus.publish(result.events)
        claim = await asyncio.to_thread(self.dispatch.claim, schedule, 1, time.time())
        self.bus.publish(claim.events)
        assert claim.requests[0].id == result.request.id
        return claim.requests[0]

    # Replicas.

    def start(self, launch: Request, ordinal: int = 0, **changes: Any) -> ShimmedServer:
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

    async def started(self, launch: Request, ordinal: int = 0, **changes: Any) -> ShimmedServer:
        """The same, and the launch says so."""
        server = await asyncio.to_thread(self.start, launch, ordinal, **changes)
        replica_id = server.run_file["replica_id"]
        await self.progresses(launch, {"replica": {"id": replica_id}})
        return server

    async def serving(self, name: str = "trial", replicas: int = 1) -> list[ShimmedServer]:
        """An environment whose launch succeeded, and which is READY."""
        launch = await self.launch(name)
        servers = [await self.started(launch, ordinal) for ordinal in range(replicas)]
        await self.succeeds(launch)
        await self.becomes(S.READY, name)
        return servers

    # Looking.

    async def environment(self, name: str = "trial") -> Environment:
        found = await self.store.read(queries.environment(name))
        assert found is not None
        return found

    async def becomes(self, state: EnvironmentState, name: str = "trial") -> Environment:
        async def holds() -> bool:
            return (await self.environment(name)).state is state

        await until(self.bus, holds)
        return await self.environment(name)

    async def replica(self, name: str = "trial") -> Replica:
        [found] = await self.store.read(queries.replicas(name))
        return found

    async def replica_becomes(self, state: ReplicaState, **fields: Any) -> Replica:
        async def holds() -> bool:
            found = await self.store.read(queries.replicas("trial"))
            known = {"state": state, **fields}
            return any(all(getattr(r, k) == v for k, v in known.items()) for r in found)

        await until(self.bus, holds)
        return await self.replica()


@pytest.fixture
async def world(
    paths: Paths, store: AsyncStore, dispatch: DispatchStore, bus: EventBus
) -> AsyncIterator[World]:
    made = World(paths, store, dispatch, bus)
    yield made
    for reconciler in made.reconcilers:
        await reconciler.stop()
    for server in made.servers:
        await asyncio.to_thread(server.close)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses before a restart."""
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_SECONDS", 0.01)


def pid_of(server: ShimmedServer) -> int:
    pid: int = server.link.status["pid"]
    return pid


def shim_pid(server: ShimmedServer) -> int:
    status = read_status_file(server.run_dir)
    assert status is not None
    pid: int = status["shim"]["pid"]
    return pid


def is_running(server: ShimmedServer) -> bool:
    status = server.link.status
    return ProcessIdentity(status["pid"], status["pid_started_at"]).is_alive()


# A launch and its ends.


async def test_a_launch_that_succeeded_is_a_ready_environment_with_its_address(
    world: World,
) -> None:
    reconciler = await world.reconcile()
    [server] = await world.serving()
    environment, replica = await world.environment(), await world.replica()
    assert (environment.state, environment.address) == (S.READY, ADDRESS)
    assert (replica.state, replica.pid) == (ReplicaState.READY, pid_of(server))
    assert reconciler.replicas.live[replica.id]["info"]["max_sessions"] == 4


async def test_sessions_are_those_of_the_shims_last_status(world: World) -> None:
    reconciler = await world.reconcile()
    [server] = await world.serving()
    server.tell("sessions 3")
    async with asyncio.timeout(WAIT_SECONDS):
        while reconciler.replicas.live[server.run_file["replica_id"]]["sessions"] != 3:
            await asyncio.sleep(0.01)  # sessions are no event


async def test_a_replica_is_shown_while_its_launch_still_waits_for_it(world: World) -> None:
    await world.reconcile()
    await world.started(await world.launch())
    await world.replica_becomes(ReplicaState.READY)
    assert (await world.environment()).state is S.STARTING


async def test_a_failed_launch_leaves_nothing_running_and_says_why(world: World) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.fails(launch, "no such folder")
    environment = await world.becomes(S.FAILED)
    assert environment.error is not None
    assert environment.error.message == "no such folder"
    assert not server.run_dir.exists()
    assert not is_running(server)


async def test_a_cancelled_launch_leaves_nothing_running(world: World) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.ends(launch, RequestState.CANCELLED)
    await world.becomes(S.STOPPED)
    assert not is_running(server)


async def test_replicas_that_a_launch_leaves_after_the_down_are_stopped(
    world: World,
) -> None:
    await world.reconcile()
    launch = await world.launch()
    await world.succeeds(await world.down())
    await world.becomes(S.STOPPED)
    server = await asyncio.to_thread(world.start, launch)
    await world.ends(launch, RequestState.CANCELLED)
    await asyncio.to_thread(server.wait_for_end)
    async with asyncio.timeout(WAIT_SECONDS):
        while server.run_dir.exists():
            await asyncio.sleep(0.01)  # that a folder goes is no event


# Deaths.


async def test_a_replica_that_dies_is_started_again(world: World) -> None:
    await world.reconcile()
    [server] = await world.serving()
    first = pid_of(server)
    os.kill(first, signal.SIGKILL)
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)
    replica = await world.replica()
    assert (replica.restarts, replica.pid == first) == (1, False)
    assert replica.exit is not None
    assert replica.exit["signal"] == "SIGKILL"


async def test_a_replica_that_dies_before_its_launch_was_heard_to_succeed_is_started_again(
    world: World,
) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(pid_of(server), signal.SIGKILL)
    await asyncio.to_thread(server.wait_state, "exited")
    await world.succeeds(launch)
    await world.replica_becomes(ReplicaState.READY, restarts=1)
    await world.becomes(S.READY)


async def test_a_replica_is_not_started_again_while_its_launch_is_responsible(
    world: World, impatient: None
) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(pid_of(server), signal.SIGKILL)
    await asyncio.to_thread(server.wait_state, "exited")
    await world.fails(launch, "it died")
    await world.becomes(S.FAILED)
    await asyncio.to_thread(server.wait_for_end)
    assert server.link.status["generation"] == 1


async def test_a_replica_that_keeps_dying_is_given_up_with_the_reason(
    world: World, impatient: None
) -> None:
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.succeeds(launch)
    for generation in range(1, restart_policy.BUDGET_EXITS + 2):
        await asyncio.to_thread(server.wait_state, "ready", generation)
        server.tell("exit 7")
        await asyncio.to_thread(server.wait_state, "exited", generation)

    async def explained() -> bool:
        return (await world.environment()).error is not None

    await until(world.bus, explained)
    environment = await world.environment()
    assert environment.state is S.FAILED
    assert environment.error is not None
    assert "exited with code 7" in environment.error.message
    assert "it exited 6 times" in environment.error.message
    await asyncio.to_thread(server.wait_for_end)


async def test_a_killed_shim_is_replaced_on_its_run_file(world: World) -> None:
    await world.reconcile()
    [server] = await world.serving()
    first = pid_of(server)
    os.kill(shim_pid(server), signal.SIGKILL)
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)
    assert (await world.replica()).pid != first


async def test_a_replica_whose_port_was_taken_waits_for_it(world: World) -> None:
    """What it waits for is said, and is no exit: its budget is not spent."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    await world.reconcile(Timing(look_again_seconds=0.01))
    launch = await world.launch()
    server = await world.started(launch, port=port)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(shim_pid(server), signal.SIGKILL)
    async with asyncio.timeout(WAIT_SECONDS):
        while is_running(server):
            await asyncio.sleep(0.01)
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


async def test_a_replica_of_another_version_is_adopted_but_not_started_again(world: World) -> None:
    """Its program and its configuration are of that version, and may not exist any more."""
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch, version=1)
    await world.succeeds(launch)
    await world.becomes(S.READY)
    os.kill(shim_pid(server), signal.SIGKILL)

    async def explained() -> bool:
        return (await world.environment()).error is not None

    await until(world.bus, explained)
    environment = await world.environment()
    assert environment.state is S.FAILED
    assert environment.error is not None
    assert "another version of openenvd had started it" in environment.error.message
    assert environment.error.hint == "launch it again"
    async with asyncio.timeout(WAIT_SECONDS):  # it is written before the replica is stopped
        while is_running(server):
            await asyncio.sleep(0.02)


async def test_a_shim_killed_during_its_launch_is_not_polled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def counted(run_dir: Path) -> Any:
        nonlocal looks
        looks += 1
        return read_status_file(run_dir)

    monkeypatch.setattr(replica_watch, "read_status_file", counted)
    await world.reconcile()
    launch = await world.launch()
    server = await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    os.kill(shim_pid(server), signal.SIGKILL)
    await asyncio.to_thread(server.wait_for_end)
    await asyncio.sleep(0.2)  # time enough for a hundred looks
    assert looks <= 1
    await world.fails(launch, "a shim died")
    await world.becomes(S.FAILED)


async def test_replicas_stopped_from_outside_fail_their_environment_with_a_reason(
    world: World,
) -> None:
    await world.reconcile()
    [server] = await world.serving()
    server.link.send("stop", grace_seconds=1.0)
    environment = await world.becomes(S.FAILED)
    assert environment.error is not None
    assert "trial" in environment.error.message


# Taking down.


async def test_a_down_that_succeeded_ends_the_environment(world: World) -> None:
    await world.reconcile()
    [server] = await world.serving()
    await world.succeeds(await world.down())
    await world.becomes(S.STOPPED)
    assert not is_running(server)
    assert await world.store.read(queries.replicas("trial")) == []


async def test_nothing_is_started_again_while_its_environment_is_taken_down(
    world: World, impatient: None
) -> None:
    reconciler = await world.reconcile()
    [server] = await world.serving()
    down = await world.down()
    async with asyncio.timeout(WAIT_SECONDS):
        while reconciler.replicas.responsibility.is_ours("trial"):
            await asyncio.sleep(0.01)
    server.tell("exit 0")
    await asyncio.to_thread(server.wait_state, "exited")
    await world.succeeds(down)
    await world.becomes(S.STOPPED)
    await asyncio.to_thread(server.wait_for_end)
    assert server.link.status["generation"] == 1


async def test_a_down_that_failed_is_finished_by_the_reconciler(world: World) -> None:
    await world.reconcile()
    [server] = await world.serving()
    await world.fails(await world.down(), "its worker was killed")
    await world.becomes(S.STOPPED)
    assert not is_running(server)
    assert not server.run_dir.exists()


async def test_an_environment_that_cannot_be_stopped_is_stopped_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 2

    def stop(*args: Any) -> Any:
        nonlocal refusals
        if refusals > 0:
            refusals -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return original(*args)

    await world.reconcile(Timing(retry_seconds=0.01))
    [server] = await world.serving()
    original = run_files.stop_environment
    monkeypatch.setattr(run_files, "stop_environment", stop)
    await world.fails(await world.down(), "its worker was killed")
    await world.becomes(S.STOPPED)
    assert (refusals, is_running(server)) == (0, False)


async def test_a_name_launched_again_is_independent_of_its_predecessor(
    world: World, impatient: None
) -> None:
    reconciler = await world.reconcile()
    [old] = await world.serving()
    async with asyncio.timeout(WAIT_SECONDS):
        while reconciler.queue._running:  # or it would take its successor for the old one
            await asyncio.sleep(0.01)
    reconciler.replicas.responsibility.let_go("trial")
    await world.store.write(observing.set_environment_state, "trial", S.FAILED, now=time.time())
    launch = await world.launch()
    await world.becomes(S.STARTING)
    os.kill(pid_of(old), signal.SIGKILL)
    await asyncio.to_thread(old.wait_state, "exited")
    await world.started(launch)
    await world.replica_becomes(ReplicaState.READY)
    assert (await world.environment()).state is S.STARTING
    assert set(reconciler.replicas.live) == {f"trial-0-{launch.id}"}
    assert old.link.status["generation"] == 1


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


async def test_the_next_daemon_adopts_running_replicas(world: World) -> None:
    first = await world.reconcile()
    [server] = await world.serving()
    pid = pid_of(server)
    await first.stop()
    second = await world.reconcile()
    async with asyncio.timeout(WAIT_SECONDS):
        while not second.replicas.live.get(server.run_file["replica_id"]):
            await asyncio.sleep(0.01)
    assert ((await world.environment()).state, (await world.replica()).pid) == (S.READY, pid)


async def test_after_a_reboot_replicas_are_started_from_their_run_files(world: World) -> None:
    first = await world.reconcile()
    [server] = await world.serving()
    await first.stop()
    before, shim = pid_of(server), shim_pid(server)
    os.kill(shim, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(before, signal.SIGKILL)
    # Of an earlier boot, no process is any that runs now: its tag is another.
    path = server.run_dir / "status.json"
    status = json.loads(path.read_text())
    status["shim"]["started_at"] += 2**30
    path.write_text(json.dumps(status))
    await world.reconcile()
    async with asyncio.timeout(WAIT_SECONDS):  # its row is READY from the beginning
        while (await world.replica()).pid in (None, before):
            await asyncio.sleep(0.01)
    await world.replica_becomes(ReplicaState.READY)
    await world.becomes(S.READY)


async def test_the_next_daemon_hears_of_a_death_in_between(world: World) -> None:
    first = await world.reconcile()
    [server] = await world.serving()
    await first.stop()
    os.kill(pid_of(server), signal.SIGSEGV)
    await asyncio.to_thread(server.wait_state, "exited")
    await world.reconcile()
    replica = await world.replica_becomes(ReplicaState.READY, restarts=1)
    assert replica.exit is not None
    assert replica.exit["signal"] == "SIGSEGV"


async def test_the_second_attempt_of_a_launch_is_adopted_however_the_first_ended(
    world: World,
) -> None:
    launch = await world.launch()
    replica_id = f"trial-0-{launch.id}"
    stopped = Replica(
        replica_id,
        "trial",
        0,
        "local",
        ReplicaState.STOPPED,
        str(world.paths.runs / replica_id),
        1.0,
    )
    await world.store.write(observing.upsert_replica, stopped, now=1.0)
    await world.reconcile()
    await world.started(launch)
    await world.succeeds(launch)
    await world.becomes(S.READY)


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


def unknown_launch(name: str = "trial") -> Request:
    """A launch that is in no table."""
    now = time.time()
    return Request("ab" * 8, "launch", Schedule.LONG, {}, RequestState.SUCCEEDED, now, name)


async def test_a_database_that_was_just_made_adopts_what_the_run_files_name(world: World) -> None:
    launch = unknown_launch()
    servers = [await asyncio.to_thread(world.start, launch, ordinal, port=0) for ordinal in (0, 1)]
    await world.reconcile()
    environment = await world.becomes(S.READY)
    assert environment.request_id == launch.id
    assert environment.address == run_files.address_of("127.0.0.1", 0)
    assert environment.spec["provider"] == "local"
    rows = await world.store.read(queries.replicas("trial"))
    assert [row.pid for row in rows] == [pid_of(server) for server in servers]
    os.kill(pid_of(servers[0]), signal.SIGKILL)  # from now on, it is restarted too
    await world.becomes(S.DEGRADED)
    await world.becomes(S.READY)


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


async def test_replicas_that_belong_to_nothing_are_stopped_at_the_start(world: World) -> None:
    launch = await world.launch()
    server = await asyncio.to_thread(world.start, launch)
    await world.store.write(observing.set_environment_state, "trial", S.STOPPED, now=time.time())
    await world.reconcile()
    assert not server.run_dir.exists()
    assert not is_running(server)


async def test_a_probe_of_an_environment_does_not_reconcile_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reconciler = await world.reconcile()
    looked_at: list[str] = []
    monkeypatch.setattr(reconciler.queue, "add", lambda name, **_: looked_at.append(name))
    new = NewRequest("probe", Schedule.SHORT, {"name": "trial"}, environment="trial")
    result = await world.store.write(submitting.submit, new, now=time.time())
    assert isinstance(result, Submitted)
    world.bus.publish(result.events)
    await world.launch("another")

    async def has_looked() -> bool:
        return bool(looked_at)

    await until(world.bus, has_looked)
    assert set(looked_at) == {"another"}


async def test_everything_is_reconciled_after_events_were_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.reconcile()
    launch = await world.launch()
    await asyncio.to_thread(world.start, launch)
    monkeypatch.setattr(world.bus, "_most_waiting", 1)
    noise = [Event(n, 1.0, "request.state", environment="nobody") for n in range(3)]
    world.bus.publish(noise)  # and no turn of the loop before:
    outcome = Outcome(launch.id, RequestState.SUCCEEDED, time.time(), result={})
    world.bus.publish(world.dispatch.record(outcomes=[outcome]))
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

    reconciler = await world.reconcile(Timing(retry_seconds=0.01))
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
    await world.reconcile(Timing(look_again_seconds=0.01))
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
    held = (replicas.responsibility._events, queue._due, replicas._watches)
    assert [len(each) for each in held] == [0, 0, 0]
