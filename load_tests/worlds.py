# SPDX-License-Identifier: Apache-2.0
"""Kills at random under stepping sessions: whose is each answer, and who is told of a new world.

    python -m load_tests.worlds [--provider local|docker|slurm] [--kills 1000] [--seed 1] [--short]

Some environments behind the gateway, each with several replicas, are stepped by clients that do as
OpenEnv's own does: one that has lost its connection while it thought connects again, in silence,
and goes on with a step. Meanwhile replicas are killed, several at once, so that those that start
again may get each other's addresses; and so are shims or the engine, the agent, the daemon and
Envoy. Now and then an environment is updated. An environment answers with its own name and
generation, with a world of each session, and with how many steps that has had. So each answer tells

    another environment or generation    answers of another than the client asked for
    a silent new world                   a step that was taken in a world that was not reset

Both have to be none. Exit code 1: one was there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from load_tests.failover import Home, own_engine
from load_tests.shared.report import Report, daemon, parse_arguments
from smoke_tests.docker_engine import DockerEngine

SOURCE = Path(__file__).with_name("envs_for_load")
ENVIRONMENTS = ("one", "two")
UPDATE_EVERY = 4  # kills: before the restart budget of a replica is spent
PAUSE_SECONDS = 2.0  # at most, between two kills
THINK_SECONDS = 0.3  # at most, between two steps
EPISODE_STEPS = 40
AGAIN_SECONDS = 0.1
ANSWER_SECONDS = 30.0
BACK_SECONDS = 120.0  # until all is ready again
SHOWN = 20
SHORT = {"kills": 12, "sessions": 8, "replicas": 2}

Kill = Callable[[Home, random.Random], None]


class Clients:
    """Sessions of all environments, and what was wrong with their answers."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.urls = urls
        self.generations = {name: {1} for name in urls}  # that may serve a new session
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def one(self, name: str, chance: random.Random) -> None:
        """Play episodes, and go on with a step where a connection was lost, as OpenEnv's client."""
        socket: ClientConnection | None = None
        world, steps = "", 0
        allowed: set[int] = set()
        while True:
            if socket is not None and steps >= EPISODE_STEPS:
                await socket.close()
                socket, world, steps = None, "", 0
            try:
                if socket is None:
                    allowed = set(self.generations[name])
                    socket = await connect(self.urls[name], open_timeout=ANSWER_SECONDS)
                    allowed |= self.generations[name]
                is_reset = not world
                answer = await self._ask(socket, "reset" if is_reset else "step")
            except (OSError, TimeoutError, WebSocketException):
                self.seen["connections that ended or were refused"] += 1
                if socket is not None:
                    await socket.close()
                socket = None
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if answer["type"] == "error":
                code = answer["data"]["code"]
                self.seen[f"told {code}"] += 1
                world = ""
                continue
            found = answer["data"]["observation"]
            self.seen["answers"] += 1
            self._check(name, allowed, found)
            allowed = {int(found["whose"].rpartition("-")[2])}  # a session stays with its own
            if is_reset:
                world, steps = found["world"], 0
            elif (found["world"], found["steps"]) != (world, steps + 1):
                self.wrong.append(f"{name}: a step in a world that was not reset: {found}")
                world = ""
            else:
                steps += 1
            await asyncio.sleep(chance.random() * THINK_SECONDS)

    def _check(self, name: str, allowed: set[int], found: dict[str, Any]) -> None:
        of, _, generation = found["whose"].rpartition("-")
        if of != name or int(generation) not in allowed:
            self.wrong.append(f"{name}, generation {sorted(allowed)}: answered by {found['whose']}")

    async def _ask(self, socket: ClientConnection, kind: str) -> dict[str, Any]:
        await socket.send(json.dumps({"type": kind, "data": {}}))
        async with asyncio.timeout(ANSWER_SECONDS):
            answer: dict[str, Any] = json.loads(await socket.recv())
        return answer


def replicas(home: Home) -> list[dict[str, Any]]:
    """All replicas that have a process."""
    found = home.openenv("status")["environments"]
    return [each for environment in found for each in environment["replicas"] if each["pid"]]


def kill_replicas(home: Home, chance: random.Random) -> None:
    """Several at once: they may come back at each other's addresses."""
    found = replicas(home)
    for replica in chance.sample(found, min(len(found), chance.randint(1, 3))):
        with suppress(ProcessLookupError):
            os.kill(replica["pid"], signal.SIGKILL)


def kill_shard(home: Home, chance: random.Random) -> None:
    """One process of a replica that serves sessions."""
    if found := replicas(home):
        with suppress(psutil.Error, IndexError):
            chance.choice(psutil.Process(chance.choice(found)["pid"]).children()).kill()


def kill_titled(title: str) -> Kill:
    """Kill one process of ours that is called so."""

    def kill(home: Home, chance: random.Random) -> None:
        found = [each for each in home.processes() if title in " ".join(each.cmdline())]
        if found:
            chance.choice(found).kill()

    kill.__name__ = f"kill_{title.split()[-1]}"
    return kill


def kill_daemon(home: Home, _: random.Random) -> None:
    """The daemon; the next command starts another."""
    os.kill(home.openenv("status")["daemon"]["pid"], signal.SIGKILL)


def kill_gateway(home: Home, _: random.Random) -> None:
    """Envoy, with all sessions that go through it."""
    with suppress(ProcessLookupError, TypeError, KeyError):  # it is not there, or not known yet
        os.kill(home.openenv("gateway", "status")["gateway"]["pid"], signal.SIGKILL)


def restart_engine(home: Home, _: random.Random) -> None:
    """A plain restart, in which containers end and may get each other's addresses."""
    assert isinstance(home.engine, DockerEngine)
    home.engine.live_restore = False
    home.engine.stop()
    home.engine.start()


KILLS: dict[str, list[tuple[int, Kill]]] = {
    "local": [(8, kill_replicas), (4, kill_shard), (2, kill_titled("openenvd: shim"))],
    "docker": [(8, kill_replicas), (2, restart_engine), (1, kill_titled("openenvd: agent"))],
    "slurm": [(8, kill_replicas), (1, kill_titled("openenvd: agent"))],
}
OF_ALL: list[tuple[int, Kill]] = [(1, kill_daemon), (1, kill_gateway)]


class Campaign:
    """The environments, their clients, and who kills and updates."""

    def __init__(self, home: Home, provider: str, seed: int, words: list[str]) -> None:
        self._home = home
        self._chance = random.Random(seed)
        self._kills = KILLS[provider] + OF_ALL
        self._words = ["--provider", provider, "--gateway", *words]
        self._generations = dict.fromkeys(ENVIRONMENTS, 0)
        for name in ENVIRONMENTS:
            self._launch(name)
        self.clients = Clients({name: self._url(name) for name in ENVIRONMENTS})

    async def run(self, kills: int, sessions: int) -> None:
        """Kill so often, and return once all is served again."""
        async with asyncio.TaskGroup() as group:
            seeds = (self._chance.random() for _ in range(sessions))
            tasks = [
                group.create_task(self.clients.one(name, random.Random(seed)))
                for seed in seeds
                for name in ENVIRONMENTS
            ]
            for number in range(kills):
                await self._kill()
                if number % UPDATE_EVERY == UPDATE_EVERY - 1:
                    await self._update(ENVIRONMENTS[number // UPDATE_EVERY % len(ENVIRONMENTS)])
                seen, wrong = dict(self.clients.seen), self.clients.wrong
                print(f"{number + 1} of {kills}: {seen}, wrong: {wrong}", file=sys.stderr)
            await self._until_ready(*ENVIRONMENTS)
            for task in tasks:
                task.cancel()

    async def _kill(self) -> None:
        weights = [weight for weight, _ in self._kills]
        [(_, kill)] = self._chance.choices(self._kills, weights)
        try:
            await asyncio.to_thread(kill, self._home, self._chance)
        except (psutil.Error, SystemExit) as exc:  # what was to be killed ended, or nobody answers
            print(f"{kill.__name__}: {exc}", file=sys.stderr)
        self.clients.seen[f"kills: {kill.__name__}"] += 1
        await asyncio.sleep(self._chance.random() * PAUSE_SECONDS)

    async def _update(self, name: str) -> None:
        """Another generation: it has replicas of its own, whose restart budget is whole."""
        await self._until_ready(name)
        served = self._generations[name]
        allowed = self.clients.generations
        allowed[name] = {served, served + 1}
        try:
            await asyncio.to_thread(self._launch, name)
            allowed[name] = {served + 1}
        except SystemExit as exc:
            print(exc, file=sys.stderr)
            self.clients.seen["updates that failed"] += 1

    async def _until_ready(self, *names: str) -> None:
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            with suppress(SystemExit):  # a daemon that has just been killed
                found = await asyncio.to_thread(self._home.openenv, "status")
                states = {each["name"]: each["state"] for each in found["environments"]}
                if all(states.get(name) in ("READY", "FAILED") for name in names):
                    return
            if time.monotonic() > deadline:
                raise SystemExit(f"not ready again: {states}")
            await asyncio.sleep(1.0)

    def _launch(self, name: str) -> None:
        self._generations[name] += 1
        whose = f"WHOSE={name}-{self._generations[name]}"
        source = "world_environment:WorldEnvironment"
        self._home.openenv("launch", source, "--name", name, "-e", whose, *self._words)

    def _url(self, name: str) -> str:
        base_url = self._home.openenv("address", name)["base_url"]
        return str(base_url).replace("http", "ws", 1) + "/ws"


def main() -> int:
    """A campaign of one provider."""
    given = parse_arguments(
        "Kills at random: whose is each answer, and who is told of a new world.",
        1,
        provider={"default": "local", "choices": list(KILLS)},
        kills={"type": int, "default": 1000},
        sessions={"type": int, "default": 16},
        replicas={"type": int, "default": 3},
        seed={"type": int, "default": 1},
        short={"action": "store_true"},
    )
    if given.short:
        vars(given).update(SHORT)
    os.chdir(SOURCE)
    with own_engine(given.provider) as engine, daemon() as environ:
        home = Home(environ, given.provider, engine, has_gateway=True)
        words = ["--replicas", str(given.replicas)]
        words += ["--token", "auto"] if given.provider == "slurm" else []
        campaign = Campaign(home, given.provider, given.seed, words)
        asyncio.run(campaign.run(given.kills, given.sessions))
    clients = campaign.clients
    report = Report(f"worlds, {given.provider}: {given.kills} kills, seed {given.seed}")
    for what, count in sorted(clients.seen.items()):
        report.add(what, "", [count])
    report.add("answers of another world", "", [len(clients.wrong)])
    for each in clients.wrong[:SHOWN]:
        report.note(each)
    report.finish(given.json)
    return 1 if clients.wrong or not clients.seen["answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
