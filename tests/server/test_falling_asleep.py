# SPDX-License-Identifier: Apache-2.0
"""How the gateway's manager puts environments to sleep, with an agent that the test speaks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openenvd.environments import run_files
from openenvd.environments.engine_address import EngineAddress
from openenvd.requests_db.async_store import AsyncStore
from openenvd.requests_db.states import ReplicaState
from openenvd.server.events.bus import EventBus
from openenvd.server.reconcile import gateway
from openenvd.server.reconcile.reconciler import Reconciler
from openenvd.server.reconcile.replica_watch import ReplicaWatch
from openenvd.server.settings import Paths
from openenvd.shim.files import RUN_FILE_NAME
from openenvd.system.json_lines import encode_line

SECONDS = 20.0
READY, ASLEEP = ReplicaState.READY, ReplicaState.ASLEEP


class Engine:
    """Two replicas of one environment, and the agent that answers for both."""

    def __init__(self, paths: Paths, reconciler: Reconciler) -> None:
        self.reconciler = reconciler
        self.answers = [True, True]  # by ordinal: whether it sleeps
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self._paths = paths
        self._states = ["ready", "ready"]
        self._generations = [1, 1]
        self._followers: list[list[asyncio.StreamWriter]] = [[], []]

    async def start(self, stack: AsyncExitStack) -> None:
        path = self._paths.agent_socket(EngineAddress("nowhere").key)
        path.parent.mkdir(parents=True, exist_ok=True)
        await stack.enter_async_context(await asyncio.start_unix_server(self._answer, path))
        for ordinal in range(2):
            run_file = write_run_file(self._paths.runs, ordinal)
            follow = partial(self._follow, ordinal)
            server = await asyncio.start_unix_server(follow, run_file["socket_path"])
            await stack.enter_async_context(server)

    def tell(self, ordinal: int, state: str, generation: int = 1) -> None:
        """A replica's status is this from now on."""
        self._states[ordinal], self._generations[ordinal] = state, generation
        for writer in self._followers[ordinal]:
            writer.write(self._status(ordinal))

    async def has(self, *states: ReplicaState) -> None:
        """Wait until the replicas are so."""
        while tuple(w.replica.state for w in self.watches()) != states:
            await asyncio.sleep(0.01)

    def watches(self) -> list[ReplicaWatch]:
        return self.reconciler.replicas.watched("trial")

    async def numbers(self) -> list[int]:
        """Which replicas Envoy is to send sessions to."""
        [backend] = await self.reconciler.gateway._backends()
        return [endpoint.number for endpoint in backend.endpoints]

    def _status(self, ordinal: int) -> bytes:
        status = {"event": "status", "state": self._states[ordinal]}
        return encode_line({**status, "generation": self._generations[ordinal]})

    async def _follow(
        self, ordinal: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._followers[ordinal].append(writer)
        writer.write(self._status(ordinal))
        await reader.read()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            message = json.loads(line)
            assert message["op"] == "sleep"
            ordinal = int(Path(message["run_dir"]).name.split("-")[1])
            writer.write(encode_line({"ok": True, "asleep": self.answers[ordinal]}))
            self.asked.put_nowait(ordinal)
        writer.close()


def write_run_file(runs: Path, ordinal: int) -> dict[str, Any]:
    run_dir = runs / f"trial-{ordinal}-1"
    run_dir.mkdir(parents=True)
    run = {"version": run_files.RUN_FILE_VERSION, "replica_id": run_dir.name, "ordinal": ordinal}
    run |= {"environment": "trial", "request_id": "1", "provider": "nowhere", "number": ordinal}
    run |= {"run_dir": str(run_dir), "socket_path": str(run_dir / "socket"), "created_at": 1.0}
    run |= {
        "host": "127.0.0.1",
        "port": 21000 + ordinal,
        "address": "http://127.0.0.1:1/envs/trial",
    }
    run |= {"spec": {"gateway": True, "replicas": 2}}
    (run_dir / RUN_FILE_NAME).write_text(json.dumps(run))
    return run


@pytest.fixture
async def engine(paths: Paths, store: AsyncStore, bus: EventBus) -> AsyncIterator[Engine]:
    made = Engine(paths, Reconciler(store, bus, paths))
    async with AsyncExitStack() as stack:
        await made.start(stack)
        await made.reconciler.start()
        yield made
        await made.reconciler.stop()


async def test_what_says_that_it_sleeps_is_not_served_again_before_it_is_seen_to(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its status takes: its server is about to end."""
    monkeypatch.setattr(gateway, "FALL_ASLEEP_SECONDS", 0.05)
    async with asyncio.timeout(SECONDS):
        await engine.has(READY, READY)
        putting = asyncio.create_task(engine.reconciler.gateway.put_to_sleep("trial"))
        assert {await engine.asked.get(), await engine.asked.get()} == {0, 1}
        await asyncio.sleep(0.5)
        assert await engine.numbers() == []
        for ordinal in range(2):
            engine.tell(ordinal, "asleep")
        await putting
        await engine.has(ASLEEP, ASLEEP)


async def test_one_that_is_used_is_served_again_as_soon_as_a_client_wants_that(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another sleeps, and however much time there would be."""
    monkeypatch.setattr(gateway, "FALL_ASLEEP_SECONDS", 3600.0)
    engine.answers = [True, False]
    manager = engine.reconciler.gateway
    async with asyncio.timeout(SECONDS):
        await engine.has(READY, READY)
        putting = asyncio.create_task(manager.put_to_sleep("trial"))
        while await engine.asked.get() != 1:
            pass
        wanting = asyncio.create_task(manager.until_served("trial"))
        engine.tell(0, "asleep")
        await putting
        assert await engine.numbers() == [1]
        wanting.cancel()


async def test_what_said_that_it_sleeps_and_does_not_is_served_again_after_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent was killed before it had done it, and the next one knows nothing of that."""
    monkeypatch.setattr(gateway, "SEEN_SECONDS", 0.05)
    async with asyncio.timeout(SECONDS):
        await engine.has(READY, READY)
        await engine.reconciler.gateway.put_to_sleep("trial")
        assert await engine.numbers() == [0, 1]


async def test_what_slept_and_has_woken_unseen_is_served_again_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "SEEN_SECONDS", 3600.0)
    async with asyncio.timeout(SECONDS):
        await engine.has(READY, READY)
        putting = asyncio.create_task(engine.reconciler.gateway.put_to_sleep("trial"))
        assert {await engine.asked.get(), await engine.asked.get()} == {0, 1}
        for ordinal in range(2):
            engine.tell(ordinal, "ready", generation=2)
        await putting
        assert await engine.numbers() == [0, 1]
