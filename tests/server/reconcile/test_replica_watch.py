# SPDX-License-Identifier: Apache-2.0
"""A replica's watch, against a shim's socket that the test speaks for."""

import asyncio
import json
import os
import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.replica_policy import GiveUp, RestartAfter
from openenvd.environments.run_files import RUN_FILE_VERSION, RunFile
from openenvd.environments.shim.files import RUN_FILE_NAME
from openenvd.requests_db.records import Replica, RequestError
from openenvd.schema.states import ReplicaState
from openenvd.server.api.views import replica_view
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.system.process.exit_reason import ExitKind, ExitReason
from openenvd.system.process.process_identity import ProcessIdentity
from openenvd.system.text.json_lines import encode_line

TIMEOUT_SECONDS = 20.0
LAUNCH = "1"


class Observed:
    """What a watch reported, and how often it asked whose business a restart is."""

    def __init__(self, *, serving: bool) -> None:
        self.recorded: list[Replica] = []
        self.serving = serving

    @property
    def states(self) -> list[ReplicaState]:
        return [each.state for each in self.recorded]

    async def change(self, replica: Replica) -> None:
        self.recorded.append(replica)

    async def give_up(self, replica: Replica, _: RequestError) -> None:
        self.recorded.append(replica)


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    status = {"state": "starting", "pid": 1, "exit": None}
    (tmp_path / "status.json").write_text(json.dumps(status))
    identity = {"replica_id": "trial-0-1", "environment": "trial", "ordinal": 0}
    identity |= {"request_id": LAUNCH, "log_path": "", "host": "127.0.0.1", "port": 0}
    data: Any = {"version": RUN_FILE_VERSION, "number": 0, "created_at": 0.0, **identity}
    return RunFile.of(tmp_path, data | {"socket_path": str(tmp_path / "shim.sock")})


Shim = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def watching(
    run_file: RunFile,
    observed: Observed,
    shim: Shim | None = None,
) -> AsyncIterator[ReplicaWatch]:
    """A watch at work, for as long as a test may take; what the shim at the socket does, if any."""
    starting, run_dir = ReplicaState.STARTING, str(run_file.run_dir)
    replica = Replica(run_file.replica_id, "trial", 0, "local", starting, run_dir, 0.0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(TIMEOUT_SECONDS))
        if shim is not None:
            server = await asyncio.start_unix_server(shim, run_file.socket_path)
            await stack.enter_async_context(server)
        watch = ReplicaWatch(replica, run_file, observed.change, observed.give_up)
        if observed.serving:
            watch.is_kept.set()
        watch.task = asyncio.create_task(watch.run())
        try:
            yield watch
        finally:
            watch.task.cancel()
            await asyncio.gather(watch.task, return_exceptions=True)


def shim_of(
    *says: dict[str, Any], hears: asyncio.Queue[Any] | None = None, then: tuple[Any, ...] = ()
) -> Shim:
    """A shim that says these, hears a command if there is a queue for it, and says the rest."""

    async def shim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for status in says:
            writer.write(encode_line({"event": "status", **status}))
        if hears is not None:
            hears.put_nowait(json.loads(await reader.readline() or "null"))
        for status in then:
            writer.write(encode_line({"event": "status", **status}))
        writer.close()

    return shim


EXITED = {"state": "exited", "generation": 1, "exit": {"kind": "exited", "pid": 1, "exit_code": 3}}


async def test_a_shim_killed_during_its_launch_is_its_launch_s_to_report(run_file: RunFile) -> None:
    async with watching(run_file, Observed(serving=False)) as watch:
        while not watch.has_failed:
            await asyncio.sleep(0.01)
        assert not watch.task.done()


async def test_a_sleep_is_no_exit_and_a_server_that_wakes_sleeps_until_it_is_ready(
    run_file: RunFile,
) -> None:
    lives = ((1, "starting"), (1, "ready"), (1, "asleep"), (2, "starting"), (2, "ready"))
    says = [{"state": state, "generation": n, "pid": 7, "restarts": 0} for n, state in lives]
    shim = shim_of(*says, hears=asyncio.Queue())  # until the watch leaves
    observed = Observed(serving=True)
    async with watching(run_file, observed, shim=shim):
        while observed.states.count(ReplicaState.READY) < 2:
            await asyncio.sleep(0.01)
    ready, asleep = ReplicaState.READY, ReplicaState.ASLEEP
    assert observed.states[-3:] == [ready, asleep, ready]


async def test_a_server_that_dies_before_its_launch_is_known_to_have_succeeded_is_restarted(
    run_file: RunFile,
) -> None:
    asked: asyncio.Queue[Any] = asyncio.Queue()
    shim = shim_of(EXITED, hears=asked)
    observed = Observed(serving=False)
    async with watching(run_file, observed, shim=shim) as watch:
        while not watch.has_failed:
            await asyncio.sleep(0.01)
        watch.is_kept.set()
        assert await asked.get() == {"op": "start"}
    assert observed.recorded[0].state is ReplicaState.BACKING_OFF


async def test_a_shim_that_cannot_be_started_again_is_given_up_in_the_end(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def revive(_: RunFile) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(run_files, "revive", revive)
    monkeypatch.setattr("openenvd.server.reconcile.replica_watch.restart_decision", impatient)
    observed = Observed(serving=True)
    async with watching(run_file, observed) as watch:
        await watch.task
    assert observed.recorded[-1].state is ReplicaState.FAILED


async def test_a_replica_that_does_not_answer_is_asked_to_drain_when_it_does(
    run_file: RunFile,
) -> None:
    asked: asyncio.Queue[Any] = asyncio.Queue()

    ready = {"state": "ready", "pid": 7, "generation": 1}
    ends = [{**ready, "state": s, "is_draining": True} for s in ("draining", "stopping", "stopped")]
    shim = shim_of(ready, hears=asked, then=tuple(ends))
    itself = ProcessIdentity.of(os.getpid())  # which is alive
    identity = {"pid": itself.pid, "started_at": itself.started_at}
    status = {"state": "ready", "pid": 7, "exit": None, "shim": identity}
    (run_file.run_dir / "status.json").write_text(json.dumps(status))
    observed = Observed(serving=True)
    async with watching(run_file, observed) as watch:
        await watch.drain(3600.0, leaves=True)
        assert not watch.task.done()  # its sessions go on
        async with await asyncio.start_unix_server(shim, run_file.socket_path):
            message = await asked.get()
            await watch.task
    assert message["op"] == "leave"
    assert message["timeout_seconds"] < 3600.0  # from when it was asked for
    assert observed.states[-2:] == [ReplicaState.DRAINING, ReplicaState.STOPPED]


@pytest.mark.parametrize("is_ours", [True, False], ids=["restarted", "left to its launch"])
async def test_one_that_is_to_be_drained_is_not_waited_with_until_it_would_be_restarted(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    asked: asyncio.Queue[Any] = asyncio.Queue()
    shim = shim_of(EXITED, hears=asked, then=({**EXITED, "state": "stopped", "is_draining": True},))
    monkeypatch.setattr("openenvd.server.reconcile.replica_watch.restart_decision", patient)
    observed = Observed(serving=is_ours)
    async with watching(run_file, observed, shim=shim) as watch:
        while watch.status == {} or (is_ours and not observed.recorded):
            await asyncio.sleep(0.01)
        await watch.drain(60.0, leaves=False)
        await watch.task
    assert (await asked.get())["op"] == "drain"
    assert observed.states[-2:] == [ReplicaState.DRAINING, ReplicaState.STOPPED]


async def test_of_a_killed_shim_nothing_is_left_when_its_replica_is_to_be_drained(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openenvd.server.reconcile.replica_watch.restart_decision", patient)
    observed = Observed(serving=True)
    async with watching(run_file, observed) as watch:
        while not observed.recorded:
            await asyncio.sleep(0.01)
        assert observed.recorded[-1].state is ReplicaState.BACKING_OFF
        await watch.drain(60.0, leaves=False)
        await watch.task
    assert observed.states[-2:] == [ReplicaState.DRAINING, ReplicaState.STOPPED]


def patient(*_: object, **__: object) -> RestartAfter:
    return RestartAfter(3600.0)


def impatient(exits: list[float], **_: object) -> RestartAfter | GiveUp:
    return RestartAfter(0.0) if len(exits) < 3 else GiveUp("it is enough")


async def test_a_replica_that_is_given_up_keeps_how_its_processes_exited(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill for memory is shown, though its last exit was another and nothing watches it now."""
    watched = "openenvd.server.reconcile.replica_watch.restart_decision"
    monkeypatch.setattr(watched, lambda *_, **__: GiveUp("it is enough"))
    killed = ExitReason(ExitKind.OOM_KILLED, pid=8).to_json()
    last = ExitReason(ExitKind.EXITED, pid=9, exit_code=3).to_json()
    kinds = {"oom_killed": 1, "exited": 1}
    history = {"exits": [{"pid": 8, "server": True, "reason": killed}], "exit_kinds": kinds}

    shim = shim_of({"state": "exited", "generation": 2, "exit": last, **history})
    observed = Observed(serving=True)
    async with watching(run_file, observed, shim=shim):
        while not observed.recorded or observed.recorded[-1].state is not ReplicaState.FAILED:
            await asyncio.sleep(0.01)
    view = replica_view(observed.recorded[-1], None)
    assert view["exit"] == last
    assert view["exit_kinds"] == kinds
    assert [each["reason"]["kind"] for each in view["exits"]] == [ExitKind.OOM_KILLED]


async def test_an_exit_that_a_shim_wrote_before_its_own_end_is_that_of_the_replica(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = "openenvd.server.reconcile.replica_watch.restart_decision"
    monkeypatch.setattr(watched, lambda *_, **__: GiveUp("it is enough"))
    last = ExitReason(ExitKind.EXITED, pid=9, exit_code=3).to_json()
    status = {"state": "exited", "generation": 1, "pid": None, "exit": last}
    (run_file.run_dir / "status.json").write_text(json.dumps(status))
    observed = Observed(serving=True)
    async with watching(run_file, observed) as watch:
        await watch.task
    assert replica_view(observed.recorded[-1], None)["exit"] == last


@pytest.mark.parametrize("last", ["stopped", "draining"])
async def test_a_drained_replica_is_not_started_again_when_it_has_ended(
    run_file: RunFile, last: str
) -> None:
    """In order, with or without its having been seen to drain; or its shim was killed meanwhile."""
    states = {"draining": 7, "stopping": 7, last: None}
    (run_file.run_dir / "status.json").write_text(
        json.dumps({"state": last, "pid": None, "exit": None, "is_draining": True})
    )

    says = [{"state": state, "pid": pid, "is_draining": True} for state, pid in states.items()]
    shim = shim_of(*says)
    observed = Observed(serving=True)
    async with watching(run_file, observed, shim=shim) as watch:
        await watch.task
    assert [each.state for each in observed.recorded if each.pid] == [ReplicaState.DRAINING]
    assert observed.recorded[-2].state is ReplicaState.DRAINING  # so that its row is forgotten
    assert observed.recorded[-1].state is ReplicaState.STOPPED


@pytest.fixture
def on_engine(run_file: RunFile) -> RunFile:
    """A replica on an engine that is written down, and has no status."""
    (run_file.run_dir / "status.json").unlink()
    data = run_file.data | {"provider": "nowhere"}
    (run_file.run_dir / RUN_FILE_NAME).write_text(json.dumps(data))
    return RunFile.of(run_file.run_dir, data)


async def test_what_an_engine_serves_gets_another_agent_though_its_status_is_lost(
    on_engine: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: queue.Queue[RunFile] = queue.Queue()
    monkeypatch.setattr(run_files, "revive", asked.put)
    observed = Observed(serving=True)
    async with watching(on_engine, observed) as watch:
        found = await asyncio.to_thread(asked.get, timeout=TIMEOUT_SECONDS)
        assert not watch.task.done()
    assert found.replica_id == on_engine.replica_id
