# SPDX-License-Identifier: Apache-2.0
"""`scale` and `restart` as the daemon carries them out: real replicas, and sessions that go on."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from openenvd.client.session import Session
from openenvd.environments import run_files
from openenvd.environments.replica_policy import replacement_room, replacement_step
from openenvd.environments.run_files import RunFile
from openenvd.environments.shim.client import (
    Fork,
    ShimClient,
    clean_up_after_shim,
    read_status_file,
)
from openenvd.environments.shim.files import RUN_FILE_NAME, STATUS_FILE_NAME
from openenvd.requests_db.records import Request
from openenvd.requests_db.sql import queries
from openenvd.requests_db.transactions import observing
from openenvd.schema import errors
from openenvd.schema.states import EnvironmentState, ReplicaState, RequestState
from openenvd.server.dispatch.running import STOPPING
from openenvd.server.operations import registry
from openenvd.server.operations.base import OperationContext
from openenvd.server.operations.launch import Launch
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.server.reconcile.replicas import ReplicaManager
from openenvd.server.reconcile.watches import Part, Roster

from ...environments.shim.conftest import fork as fork
from ..conftest import until
from .conftest import new_watch
from .test_reconciler import World
from .test_reconciler import world as world

WAIT_SECONDS = 60.0
# A class that cannot be imported any more when its switch is there.
SAMPLE = """
import pathlib
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
if pathlib.Path({switch!r}).exists():
    raise ImportError("its data is gone")
class Sample(EchoEnvironment):
    pass
"""


WAITS = SAMPLE.replace("if ", "while ").replace(
    'raise ImportError("its data is gone")', "__import__('time').sleep(0.02)"
)


class Changed:
    """An environment that was launched, and the requests that change it."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.submit = self.submit
        self.log: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.after: Callable[[dict[str, Any]], object] = lambda _: None  # called with progress

    async def launch(self, source: str = "echo", **options: Any) -> str:
        """Launch it; returns its address."""
        if not self.world.reconcilers:
            await self.world.reconcile()
        launch, prepared = await self.prepared(source, **options)
        result = await self.carry_out(launch, prepared)
        assert self.log[-1].startswith(f"trial is ready at {result['environment']['address']}")
        assert [told["phase"] for told in self.told][:: len(self.told) - 1] == ["starting", "ready"]
        self.log.clear()
        self.told.clear()
        await self.world.becomes(EnvironmentState.READY)
        return str(result["environment"]["address"])

    async def prepared(self, source: str = "echo", **options: Any) -> tuple[Request, Any]:
        """A launch that runs, or an update, and what its worker has prepared."""
        payload = Launch.Payload.model_validate({"source": source, "name": "trial", **options})
        launch = await self.world.launch(**payload.model_dump(mode="json", exclude={"name"}))
        given = (launch.payload, launch.id, str(self.world.paths.home), lambda _: None)
        return launch, json.loads(json.dumps(await asyncio.to_thread(Launch.call, *given)))

    async def begun(self, operation: str, **payload: Any) -> Request:
        known = registry.OPERATIONS[operation].Payload.model_validate({"name": "trial", **payload})
        return await self.world.change(operation, **known.model_dump(exclude={"name"}))

    async def carry_out(self, request: Request, prepared: Any = None) -> Any:
        def progress(data: dict[str, Any]) -> None:
            self.told.append(data)
            self.after(data)

        context = OperationContext(request.id, self.world.paths.home, progress, self.log.append)
        try:
            changes = self.world.reconcilers[-1].changes
            result = json.loads(json.dumps(await changes.carry_out(request, context, prepared)))
        except errors.EnvironmentsError as exc:
            await self.world.fails(request, exc.message)
            raise
        await self.world.ends(request, RequestState.SUCCEEDED, result=result)
        return result

    async def run(self, operation: str, **payload: Any) -> Any:
        return await self.carry_out(await self.begun(operation, **payload))

    async def submit(self, operation: str, payload: dict[str, Any]) -> None:
        given = {name: value for name, value in payload.items() if name != "name"}
        self.world.reconcilers[-1]._tasks.spawn(self.run(operation, **given), operation)

    async def killed(
        self, request: Request, when: Callable[[dict[str, Any]], bool], prepared: Any = None
    ) -> None:
        """Carry out a request until the daemon ends, and start the next daemon."""
        task = asyncio.ensure_future(self.carry_out(request, prepared))
        self.after = lambda data: task.cancel(STOPPING) if when(data) else None
        with pytest.raises(asyncio.CancelledError):
            await task
        self.after = lambda _: None
        await self.world.reconcilers.pop().stop()
        await self.world.reconcile()

    def replicas(self) -> list[RunFile]:
        """Those that are not taken away, the oldest first."""
        launch = run_files.that_serves(self.world.paths.runs, "trial")
        watches = self.world.reconcilers[-1].replicas
        name = None if launch is None else launch.request_id
        return [watch.run_file for watch in watches.staying("trial", name)]

    @property
    def ordinals(self) -> list[int]:
        return [each.ordinal for each in self.replicas()]

    @property
    def ids(self) -> list[str]:
        return [each.replica_id for each in self.replicas()]


@pytest.fixture
async def trial(world: World, fork: Fork) -> Any:
    """An environment to be launched and changed; nothing of it runs afterwards."""
    world.fork = fork
    yield Changed(world)
    for reconciler in world.reconcilers:
        await reconciler.stop()
    await asyncio.to_thread(run_files.stop_environment, world.paths.runs, "trial", 0.0)


@contextmanager
def session(address: str) -> Iterator[Session]:
    with Session(address, WAIT_SECONDS, WAIT_SECONDS) as made:
        made.reset()
        yield made


def steps(made: Session) -> bool:
    return bool(made.step({"message": "hey"}).observation)


def plays(address: str) -> bool:
    with session(address) as client:
        return steps(client)


def wait_for(run_file: RunFile, predicate: Callable[[Any], bool]) -> dict[str, Any]:
    with ShimClient.connect(run_file.socket_path) as link:
        return dict(link.wait(predicate, WAIT_SECONDS))


async def test_more_replicas_take_sessions_at_the_same_address(trial: Changed) -> None:
    address = await trial.launch()
    [first] = trial.replicas()
    result = await trial.run("scale", replicas=3)
    assert (result["environment"]["name"], result["replicas"]) == ("trial", 3)
    assert all(replica["memory_bytes"] for replica in result["environment"]["replicas"])
    assert (len(result["started"]), result["draining"]) == (2, [])
    assert trial.ordinals == [0, 1, 2]
    assert trial.ids[1:] == result["started"]
    assert {r.address for r in trial.replicas()} == {address}
    assert {r.request_id for r in trial.replicas()} == {first.request_id}  # the environment's own
    waiting = [event for event in trial.told if event.get("phase") == "waiting"]
    counts = dict.fromkeys((each["done"], each["total"]) for each in waiting)
    assert list(counts) == [(0, 2), (1, 2), (2, 2)]
    assert "1 of 2 replicas ready" in [each["message"] for each in waiting]
    assert (await trial.world.environment()).spec["replicas"] == 3
    pid = wait_for(first, lambda s: s["pid"])["pid"]
    os.kill(pid, signal.SIGSTOP)  # the first accepts nothing now
    try:
        assert await asyncio.to_thread(plays, address)
    finally:
        os.kill(pid, signal.SIGCONT)


def size_of(status: dict[str, Any]) -> int:
    size: int = (status.get("capacity") or status["info"])["max_sessions"]
    return size


async def test_a_share_holds_for_sessions_and_after_a_restart_of_the_server(trial: Changed) -> None:
    address = await trial.launch(max_sessions=4, admission_timeout_seconds=0.0)
    await trial.run("scale", replicas=2)
    only, youngest = trial.replicas()
    assert [r.max_sessions for r in trial.replicas()] == [2, 2]
    written = [(r.run_dir / RUN_FILE_NAME).stat().st_ino for r in trial.replicas()]
    await trial.run("scale", replicas=2)  # no other share: no file is written
    assert written == [(r.run_dir / RUN_FILE_NAME).stat().st_ino for r in trial.replicas()]
    await trial.run("scale", replicas=1, drain_timeout_seconds=0)
    await trial.world.until(lambda: not youngest.run_dir.exists())  # it would refuse sessions
    await asyncio.to_thread(wait_for, only, lambda s: size_of(s) == 4)

    def has_four() -> None:
        with ExitStack() as stack:
            for _ in range(4):  # more than the two that it had meanwhile
                stack.enter_context(session(address))

    await asyncio.to_thread(has_four)
    pid = wait_for(only, lambda s: s["pid"])["pid"]
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_for, only, lambda s: s["restarts"] and s["state"] == "ready")
    assert wait_for(only, lambda s: s["info"])["info"]["max_sessions"] == 4


async def test_a_launch_without_a_package_names_the_option_that_installs_it(
    trial: Changed, tmp_path: Path
) -> None:
    (tmp_path / "needy.py").write_text("import no_such_package")
    with pytest.raises(errors.ReplicaFailed, match="No module named 'no_such_package'") as failed:
        await trial.launch("needy:Needy", cwd=str(tmp_path))
    assert "--with PACKAGE" in str(failed.value.hint)


@pytest.mark.parametrize(
    "change", [{"operation": "scale", "replicas": 3}, {"operation": "restart"}]
)
async def test_what_cannot_start_leaves_everything_as_it_was(
    trial: Changed, tmp_path: Path, change: dict[str, Any]
) -> None:
    switch = tmp_path / "gone"
    (tmp_path / "sample_env.py").write_text(SAMPLE.format(switch=str(switch)))
    address = await trial.launch("sample_env:Sample", cwd=str(tmp_path))
    before = trial.ids
    switch.touch()
    with pytest.raises(errors.ReplicaFailed, match="its data is gone"):
        await trial.run(**change)
    assert trial.ids == before
    found = run_files.of_environment(trial.world.paths.runs, "trial")
    assert [r.replica_id for r in found] == before == list(await trial.world.rows())
    assert (await trial.world.environment()).state is EnvironmentState.READY
    assert (await trial.world.environment()).spec["replicas"] == 1
    assert await asyncio.to_thread(plays, address)


async def test_what_is_added_and_not_ready_names_the_launch_that_says_how_long_that_may_take(
    trial: Changed, tmp_path: Path
) -> None:
    switch = tmp_path / "waits"
    (tmp_path / "sample_env.py").write_text(WAITS.format(switch=str(switch)))
    await trial.launch("sample_env:Sample", cwd=str(tmp_path), ready_timeout_seconds=5.0)
    switch.touch()
    with pytest.raises(errors.NotReady, match="was not ready after 5 s") as told:
        await trial.run("scale", replicas=2)
    assert str(told.value.hint).startswith("its launch says")


async def test_a_replica_that_is_added_is_not_the_environments_before_it_is_ready(
    trial: Changed, tmp_path: Path
) -> None:
    """A replica whose shim is killed is not started again; the environment continues to serve."""
    switch = tmp_path / "waits"
    (tmp_path / "sample_env.py").write_text(WAITS.format(switch=str(switch)))
    await trial.launch("sample_env:Sample", cwd=str(tmp_path))
    switch.touch()
    running = asyncio.ensure_future(trial.run("scale", replicas=2))
    await trial.world.until(lambda: len(trial.ids) == 2)
    added = trial.replicas()[1]
    shim = (await asyncio.to_thread(wait_for, added, lambda s: s["pid"]))["shim"]["pid"]
    await trial.world.replica_becomes(ReplicaState.STARTING)
    assert (await trial.world.environment()).state is EnvironmentState.READY
    os.kill(shim, signal.SIGKILL)
    with pytest.raises(
        errors.ReplicaFailed, match="the shim of replica 1 of trial ended unexpectedly"
    ):
        await running
    assert trial.ordinals == [0]
    assert not added.run_dir.exists()


@pytest.mark.parametrize("replicas", [1, 3])
async def test_the_next_daemon_goes_on_with_a_scale(trial: Changed, replicas: int) -> None:
    await trial.launch(replicas=2)
    request = await trial.begun("scale", replicas=replicas)
    if replicas == 3:
        await trial.killed(request, lambda told: told["message"] == "1 replica starting")
    result = await trial.carry_out(request)
    assert len(trial.ids) == replicas
    assert (await trial.world.environment()).spec["replicas"] == replicas
    assert result["started"] == trial.ids[2:]


async def test_what_was_written_down_and_not_started_is_started_by_the_next_daemon(
    trial: Changed,
) -> None:
    await trial.launch()
    request = await trial.begun("scale", replicas=2)
    await trial.killed(request, lambda told: told["message"] == "1 replica starting")
    left = trial.replicas()[1]
    await asyncio.to_thread(wait_for, left, lambda s: s["pid"])
    await asyncio.to_thread(clean_up_after_shim, left.run_dir)
    (left.run_dir / STATUS_FILE_NAME).unlink()
    await trial.carry_out(request)
    assert len(trial.ids) == 2
    assert trial.replicas()[1].created_at > left.created_at


async def test_an_environment_is_stopped_before_the_request_for_that_ends(trial: Changed) -> None:
    await trial.launch(replicas=2)
    ids = trial.ids
    stopped = await trial.world.carry_out(await trial.world.down())
    assert sorted(stopped) == sorted(ids)
    assert (await trial.world.environment()).state is EnvironmentState.STOPPED
    again = await trial.run("down")
    assert again == {"environment": {"name": "trial", "state": "STOPPED"}, "stopped": []}
    with pytest.raises(errors.NotRunning, match="trial has no replicas"):
        await trial.run("scale", replicas=2)


async def test_what_a_request_that_has_ended_left_beside_is_drained(trial: Changed) -> None:
    """As when its daemon was killed, and the next one heard that it is cancelled."""
    await trial.launch()
    request = await trial.begun("scale", replicas=3)
    await trial.killed(request, lambda told: told["message"] == "2 replicas starting")
    await trial.world.until(lambda: len(trial.ids) == 3)
    await trial.world.ends(request, RequestState.CANCELLED)
    await trial.world.until(lambda: trial.ordinals == [0])


async def test_sessions_that_are_left_are_told_with_the_time_that_they_have(trial: Changed) -> None:
    address = await trial.launch()
    with session(address) as client:
        await trial.world.until(
            lambda: (
                trial.world.reconcilers[-1].replicas.watches.of("trial")[0].status.get("sessions")
            )
        )
        trial.after = lambda told: client.close() if told.get("phase") == "draining" else None
        await trial.run("restart")
    told = [event for event in trial.told if event.get("phase") == "draining"]
    assert [event["message"] for event in told] == [
        "draining: 1 of 1 session left",
        "draining: 0 of 1 session left",
    ]
    assert [(event["done"], event["total"]) for event in told] == [(0, 1), (1, 1)]
    assert 598.0 < told[0]["at_most_seconds"] <= 600.0


WHICH: list[dict[str, Any]] = [{}, {"together": [0, 1]}, {"replica": 1}]


@pytest.mark.parametrize("which", WHICH, ids=repr)
@pytest.mark.parametrize("moment", ["starting", "draining"])
async def test_the_next_daemon_goes_on_with_a_restart(
    trial: Changed, which: dict[str, Any], moment: str
) -> None:
    """It replaces nothing a second time: there are as many replicas as before."""
    await trial.launch(replicas=2)
    before = set(trial.ids)
    request = await trial.begun("restart", **which)

    def is_then(told: dict[str, Any]) -> bool:
        return moment in str(told["message"]) or told["phase"] == moment

    await trial.killed(request, is_then)
    statuses = {one.replica_id: read_status_file(one.run_dir) for one in trial.replicas()}
    ready = {name for name, status in statuses.items() if status and status["state"] == "ready"}
    started = ready - before
    result = await trial.carry_out(request)
    assert len(trial.ids) == 2
    assert set(trial.ids) >= started
    assert {each["new"] for each in result["restarted"]} == set(trial.ids) - before
    assert len(set(trial.ids) - before) == (1 if "replica" in which else 2)


@pytest.mark.parametrize("is_cancelled", [False, True])  # too late
async def test_an_update_replaces_all_and_its_request_ends_when_the_old_begin_no_session(
    trial: Changed, is_cancelled: bool
) -> None:
    address = await trial.launch(replicas=2)
    before, [old, _] = trial.ids, trial.replicas()
    pid = wait_for(old, lambda s: s["pid"])["pid"]
    with session(address) as client:
        os.kill(pid, signal.SIGSTOP)  # it cannot take note
        update, prepared = await trial.prepared(replicas=2)
        running = asyncio.ensure_future(trial.carry_out(update, prepared))
        await until_serves(trial, update)
        await trial.world.generations_become(g2="SERVING", g1="DRAINING")
        assert not running.done()
        if is_cancelled:
            running.cancel()
        os.kill(pid, signal.SIGCONT)
        result = await running
        new = {each["id"] for each in result["environment"]["replicas"]}
        await trial.world.until(lambda: new == set(trial.ids))
        assert result["environment"]["address"] == address
        assert not new & set(before)
        assert await asyncio.to_thread(plays, address)
        assert await asyncio.to_thread(steps, client)
    await trial.world.generations_become(g2="SERVING", g1="RETIRED")


ROOMS = [{"max_surge": "0", "max_unavailable": "1"}, {"max_surge": "1"}]


@pytest.mark.parametrize("room", ROOMS, ids=repr)
async def test_an_update_keeps_to_the_room_that_there_is(
    trial: Changed, room: dict[str, str]
) -> None:
    await trial.launch(replicas=3)
    before, most = set(trial.ids), []
    runs = trial.world.paths.runs

    def count(_: object) -> None:  # a server has exited before its folder is removed
        found = run_files.of_environment(runs, "trial")
        states = [(read_status_file(each.run_dir) or {}).get("state") for each in found]
        most.append(sum(state not in ("stopped", "failed") for state in states))

    trial.after = count
    await trial.carry_out(*await trial.prepared(replicas=3, **room))
    assert len(trial.ids) == 3
    assert not before & set(trial.ids)
    assert max(most) == 3 + int(room["max_surge"])
    assert (await trial.world.environment()).spec["max_surge"] == room["max_surge"]
    await trial.world.generations_become(g2="SERVING", g1="RETIRED")
    await trial.run("restart")  # which uses the same
    assert (await trial.world.environment()).state is EnvironmentState.READY


UNLICENSED = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

class Sample(EchoEnvironment):
    def __init__(self):
        raise OSError("no licence")
"""


async def test_a_launch_whose_sessions_would_fail_ends_with_the_cause(
    trial: Changed, tmp_path: Path
) -> None:
    (tmp_path / "sample_env.py").write_text(UNLICENSED)
    why = "the sessions of this launch would fail: OSError: no licence"
    with pytest.raises(errors.ReplicaFailed, match=why):
        await trial.launch("sample_env:Sample", cwd=str(tmp_path))


@pytest.mark.parametrize("room", [{}, *ROOMS], ids=repr)
async def test_an_update_that_fails_half_way_leaves_what_served(
    trial: Changed, tmp_path: Path, room: dict[str, str]
) -> None:
    switch = tmp_path / "gone"
    (tmp_path / "sample_env.py").write_text(SAMPLE.format(switch=str(switch)))
    given: dict[str, Any] = {"source": "sample_env:Sample", "cwd": str(tmp_path), "replicas": 3}
    address = await trial.launch(**given)
    before = await trial.world.environment()
    if room:  # the first serves by then
        trial.after = lambda told: switch.touch() if "ready" in str(told["message"]) else None
    else:
        switch.touch()
    update, prepared = await trial.prepared(**given, **room)
    with pytest.raises(errors.ReplicaFailed, match="its data is gone"):
        await trial.carry_out(update, prepared)
    switch.unlink()
    await trial.world.generations_become(g2="FAILED", g1="SERVING")
    await trial.world.becomes(EnvironmentState.READY)
    await trial.world.until(lambda: len(trial.ids) == 3)
    assert (await trial.world.environment()).request_id == before.request_id
    assert {each.request_id for each in trial.replicas()} == {before.request_id}
    assert await asyncio.to_thread(plays, address)


@pytest.mark.parametrize("room", [{}, *ROOMS], ids=repr)
@pytest.mark.parametrize("moment", ["starting", " ready", "draining"])
async def test_the_next_daemon_goes_on_with_an_update(
    trial: Changed, room: dict[str, str], moment: str
) -> None:
    address = await trial.launch(replicas=2)
    before = set(trial.ids)
    update, prepared = await trial.prepared(replicas=2, **room)

    def is_then(told: dict[str, Any]) -> bool:
        return told["phase"] == moment or moment in str(told["message"])

    if not room and moment == "draining":  # nothing is, before it serves
        moment = "2 of 2 replicas ready"
    await trial.killed(update, is_then, prepared)
    assert await asyncio.to_thread(plays, address)
    await trial.carry_out(update, prepared)
    assert len(trial.ids) == 2
    assert not before & set(trial.ids)
    await trial.world.generations_become(g2="SERVING", g1="RETIRED")
    await trial.world.until(lambda: len(list(trial.world.paths.runs.iterdir())) == 2)


@pytest.mark.parametrize("room", [{}, ROOMS[0]], ids=repr)
async def test_an_update_that_was_cancelled_while_no_daemon_ran_leaves_what_served(
    trial: Changed, room: dict[str, str]
) -> None:
    await trial.launch(replicas=2)
    before = trial.ids
    update, prepared = await trial.prepared(replicas=2, **room)
    await trial.killed(update, lambda told: "ready" in str(told["message"]), prepared)
    await trial.world.ends(update, RequestState.CANCELLED)
    await trial.world.generations_become(g2="FAILED", g1="SERVING")
    [failed, _] = await trial.world.store.read(queries.generations("trial"))
    assert failed.error == observing.CANCELLED
    await trial.world.until(lambda: len(trial.ids) == 2)
    assert (trial.ids == before) != bool(room)  # with no room one of the old had been drained
    await trial.world.until(lambda: len(list(trial.world.paths.runs.iterdir())) == 2)


async def until_serves(trial: Changed, update: Request) -> None:
    async def holds() -> bool:
        return (await trial.world.environment()).request_id == update.id

    await until(trial.world.bus, holds)


async def test_the_id_of_a_replica_that_has_ended_is_not_given_to_another(trial: Changed) -> None:
    await trial.launch()
    [first] = trial.replicas()
    await trial.run("restart")
    await trial.world.until(lambda: not first.run_dir.exists())
    await trial.run("restart")
    [new] = trial.replicas()
    assert new.ordinal == first.ordinal
    assert new.replica_id != first.replica_id


async def test_one_replica_can_be_restarted_by_its_number(trial: Changed) -> None:
    await trial.launch(replicas=2)
    first, _ = trial.ids
    await trial.run("restart", replica=1)
    assert trial.ordinals == [0, 2]
    assert trial.ids[0] == first
    with pytest.raises(errors.NotRunning, match="trial has no replica 1") as refused:
        await trial.run("restart", replica=1)
    assert refused.value.hint == "its replicas are 0, 2"


async def test_replicas_that_end_together_are_restarted_in_one_go(trial: Changed) -> None:
    await trial.launch(replicas=3)
    kept, *ending = trial.replicas()
    together = [each.ordinal for each in ending]
    result = await trial.run("restart", together=[*together, 9], drain_timeout_seconds=7)
    assert {each["old"] for each in result["restarted"]} == {each.replica_id for each in ending}
    assert trial.ids[0] == kept.replica_id
    assert {each["new"] for each in result["restarted"]} == set(trial.ids[1:])
    index = trial.log.index
    assert index("replica 4 is starting") < index("draining replica 1: its sessions have 7 s")
    assert (await trial.run("restart", together=[9]))["restarted"] == []


async def test_a_start_is_said_before_a_replica_is_ready_however_soon_it_is(
    trial: Changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt = ReplicaManager.adopt_started

    async def adopt_slowly(self: ReplicaManager, started: list[RunFile]) -> None:
        await adopt(self, started)
        watches = [self.watches[each.replica_id] for each in started]
        while any(each.status.get("state") != "ready" for each in watches):
            await asyncio.sleep(0.01)

    monkeypatch.setattr(ReplicaManager, "adopt_started", adopt_slowly)
    await trial.launch()
    await trial.run("scale", replicas=2)
    assert [line.partition(" (")[0] for line in trial.log] == ["replica 1 is starting", "replica 1"]


@pytest.mark.parametrize(
    ("replicas", "surge", "unavailable", "room"),
    [
        (4, None, None, (9, 0)),
        (4, "25%", None, (1, 0)),
        (5, "25%", "25%", (2, 1)),  # as Kubernetes rounds
        (3, "0", "25%", (0, 1)),
        (3, "2", "1", (2, 1)),
    ],
)
def test_the_room_of_a_replacement_is_a_number_or_a_percentage(
    replicas: int, surge: str | None, unavailable: str | None, room: tuple[int, int]
) -> None:
    assert replacement_room(replicas, surge, unavailable, default_surge=9) == room


@pytest.mark.parametrize("replicas", [10, 100, 1000])
def test_a_change_looks_at_no_more_replicas_than_have_changed(replicas: int) -> None:
    """A restart examines five replicas for each that it replaces, however many there are."""
    looked_at, parts = 0, dict[str, Part | None]()

    def part_of(watch: ReplicaWatch) -> Part | None:
        nonlocal looked_at
        looked_at += 1
        return parts[watch.replica.id]

    roster = Roster(part_of)
    watches = [new_watch(number) for number in range(2 * replicas)]
    for watch in watches[:replicas]:
        parts[watch.replica.id] = Part.OLD
        roster.note(watch)
    for old, new in zip(watches[:replicas], watches[replicas:], strict=True):
        for watch, part in ((new, Part.WAITING), (new, Part.KEPT), (old, Part.ENDING), (old, None)):
            parts[watch.replica.id] = part
            roster.note(watch)
    assert (roster.count(Part.KEPT), roster.count(Part.OLD, Part.ENDING)) == (replicas, 0)
    assert looked_at == 5 * replicas


@pytest.mark.parametrize(
    ("surge", "unavailable", "most", "least"),
    [(1, 0, 5, 4), (2, 0, 6, 4), (0, 1, 4, 3), (4, 4, 8, 0)],
)
def test_replacements_keep_to_the_room_and_the_number_that_there_is_to_be(
    surge: int, unavailable: int, most: int, least: int
) -> None:
    """Of four replicas, when each step takes effect before the next is decided."""
    old, ready, starting, ending, steps = 4, 0, 0, 0, 0
    room = surge, unavailable
    while ready < 4 or old or ending:
        start, drain = replacement_step(
            4, room, staying=0, old=old, new=ready + starting, ready=ready, ending=ending
        )
        starting, old, ending = starting + start, old - drain, ending + drain
        assert least <= old + ready <= old + ready + starting + ending <= most
        if not (start or drain):
            ready, starting, ending = ready + starting, 0, 0
        steps += 1
        assert steps < 40


def test_a_replica_that_is_missing_is_started_by_the_way() -> None:
    assert replacement_step(3, (1, 0), staying=0, old=2, new=0, ready=0, ending=0) == (2, 0)
    assert replacement_step(3, (1, 0), staying=0, old=2, new=1, ready=1, ending=0) == (1, 0)


async def test_what_scales_itself_has_a_share_of_the_most_and_stays_in_its_range(
    trial: Changed,
) -> None:
    await trial.launch(min_replicas=2, max_replicas=4, max_sessions=16)
    assert [r.max_sessions for r in trial.replicas()] == [4, 4]
    await trial.run("scale", replicas=3, reason="8 of 8 sessions are taken")
    assert "trial: 8 of 8 sessions are taken" in trial.log
    assert [r.max_sessions for r in trial.replicas()] == [4, 4, 4]
    told = "trial scales itself between 2 and 4 replicas, and 1 is not among these"
    with pytest.raises(errors.InvalidSpec, match=told):
        await trial.run("scale", replicas=1)


async def test_what_sleeps_stays_awake_with_several_replicas_and_has_no_more_than_its_sessions(
    trial: Changed,
) -> None:
    await trial.launch(idle_timeout_seconds=60.0, max_sessions=2)
    words = "trial does not sleep while it has several replicas"
    await trial.run("scale", replicas=2)
    assert words in trial.log
    with pytest.raises(errors.InvalidSpec, match="3 replicas cannot share 2 sessions"):
        await trial.run("scale", replicas=3)
    assert len(trial.ids) == 2
    trial.log.clear()
    await trial.run("scale", replicas=1)
    assert words not in trial.log
