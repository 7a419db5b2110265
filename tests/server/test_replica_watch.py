# SPDX-License-Identifier: Apache-2.0
"""A replica's watch, against a shim's socket that the test speaks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.restart_policy import GiveUp, RestartAfter
from openenvd.environments.run_files import RUN_FILE_VERSION, RunFile
from openenvd.requests_db.records import Replica, RequestError
from openenvd.requests_db.states import ReplicaState
from openenvd.server.reconcile.replica_watch import ReplicaWatch, Responsibility
from openenvd.server.reconcile.status_writer import Timing
from openenvd.system.json_lines import encode_line

TIMEOUT_SECONDS = 20.0


class Observed:
    """What a watch reported, and how often it asked whose business a restart is."""

    def __init__(self, *, serving: bool) -> None:
        self.recorded: list[Replica] = []
        self.responsibility = CountingResponsibility()
        if serving:
            self.responsibility.take_over("trial")

    async def change(self, replica: Replica) -> None:
        self.recorded.append(replica)

    async def give_up(self, replica: Replica, _: RequestError) -> None:
        self.recorded.append(replica)


class CountingResponsibility(Responsibility):
    def __init__(self) -> None:
        super().__init__()
        self.looked = 0

    def is_ours(self, name: str) -> bool:
        self.looked += 1
        return super().is_ours(name)


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    status = {"state": "starting", "pid": 1, "exit": None}
    (tmp_path / "status.json").write_text(json.dumps(status))
    identity = {"replica_id": "trial-0-1", "environment": "trial", "ordinal": 0}
    data = {"version": RUN_FILE_VERSION, **identity}
    return RunFile.of(tmp_path, {**data, "socket_path": str(tmp_path / "shim.sock")})


@asynccontextmanager
async def watching(run_file: RunFile, observed: Observed) -> AsyncIterator[ReplicaWatch]:
    replica = Replica(
        id=run_file.replica_id,
        environment="trial",
        ordinal=0,
        provider="local",
        state=ReplicaState.STARTING,
        run_dir=str(run_file.run_dir),
        started_at=0.0,
    )
    watch = ReplicaWatch(
        replica,
        run_file,
        observed.responsibility,
        Timing(),
        on_change=observed.change,
        on_give_up=observed.give_up,
    )
    watch.task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        watch.task.cancel()
        await asyncio.gather(watch.task, return_exceptions=True)


async def test_a_shim_killed_during_its_launch_is_not_looked_for_without_pause(
    run_file: RunFile,
) -> None:
    observed = Observed(serving=False)
    async with watching(run_file, observed) as watch:
        await asyncio.sleep(0.3)
        assert not watch.task.done()
    assert observed.responsibility.looked < 10


async def test_a_server_that_dies_before_its_launch_is_known_to_have_succeeded_is_restarted(
    run_file: RunFile,
) -> None:
    asked: asyncio.Queue[Any] = asyncio.Queue()

    async def shim(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exited = {"kind": "exited", "pid": 1, "exit_code": 3}
        status = {"event": "status", "state": "exited", "generation": 1, "exit": exited}
        writer.write(encode_line(status))
        asked.put_nowait(json.loads(await reader.readline() or "null"))
        writer.close()

    observed = Observed(serving=False)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        await asyncio.start_unix_server(shim, run_file.socket_path),
        watching(run_file, observed),
    ):
        await asyncio.sleep(0.1)  # it has heard of the exit by now
        observed.responsibility.take_over("trial")
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
    async with asyncio.timeout(TIMEOUT_SECONDS), watching(run_file, observed) as watch:
        await watch.task
    assert observed.recorded[-1].state is ReplicaState.FAILED


def impatient(exits: list[float], **_: object) -> RestartAfter | GiveUp:
    return RestartAfter(0.0) if len(exits) < 3 else GiveUp("it is enough")
