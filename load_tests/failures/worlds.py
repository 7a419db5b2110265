# SPDX-License-Identifier: Apache-2.0
"""Random kills under stepping sessions: is each answer's world and each death's cause right?

    python -m load_tests.failures.worlds [--provider local|docker|slurm] [--kills 1000]
                                [--seed 1] [--short] [--json FILE]

Two environments behind the gateway have several replicas each. Their clients behave as OpenEnv's
own does: a client whose connection was lost between two steps connects again without an error, and
continues with a step. Meanwhile several replicas are killed at once, so that restarted ones may get
each other's addresses; shims, the engine, the agent, the daemon and Envoy are killed, too. Some
sessions exceed the memory limit. Every fourth round updates an environment. An answer has the
environment's name and generation, the session's world and the world's number of steps. Faults:

    another environment or generation    the client asked for a different one
    a silent new world                   a step ran in a world that was not reset
    a session that was lost elsewhere    neither its replica, nor the gateway, nor an engine was
                                         killed in this round or the one before
    a death without its true cause       `status` shows no exit, or calls a kill by hand one for
                                         memory; or it does not show a kill for memory as one, or
                                         the client was not told of that
    what is left                         run folders, processes or containers, after each `down`

Each fault makes the exit code 1. After each round the results are written to
the JSON file, and a later call with the same file continues until `--kills` processes were killed.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.report import KILLED, Findings, daemon, parse_arguments
from openenvd.environments.engines.providers import RUN_DIR_VARIABLE
from openenvd.schema.layout import Layout
from openenvd.schema.protocol import REPLICA_HEADER
from smoke_tests.background import title
from smoke_tests.conftest import smoke_cache
from smoke_tests.engines import docker_engine, slurm_engine
from smoke_tests.engines.docker_engine import DockerEngine
from smoke_tests.engines.slurm_engine import SlurmCluster

SOURCE = Path(__file__).parents[1] / "envs_for_load"
ENVIRONMENTS = ("one", "two")
MAX_AT_ONCE = 5  # replicas
UPDATE_EVERY = 4  # rounds: an update renews the replicas' restart budgets
PAUSE_SECONDS = 2.0  # at most, between two rounds
THINK_SECONDS = 0.3  # at most, between two steps
EPISODE_STEPS = 40
AGAIN_SECONDS = 0.1
ANSWER_SECONDS = 30.0
BACK_SECONDS = 120.0  # until every replica is ready again
NOTICED_SECONDS = 3.0  # until the death of a shim has been noticed
EXPLAINED_SECONDS = 30.0  # until `status` shows how a process exited
MEMORY = "400M"  # of a replica
MEMORY_SHARE = 0.1  # of kills
FOR_MEMORY = "oom_killed"  # a kind of exit
SHORT = {"kills": 12, "sessions": 8, "replicas": 2}

LEFT_SECONDS = 10.0  # until all that was stopped is gone


@dataclass(frozen=True)
class Home:
    """A daemon's home."""

    environ: dict[str, str]
    engine: DockerEngine | SlurmCluster | None

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.environ["OPENENV_HOME"]))

    def openenv(self, *words: str) -> Any:
        return openenv(self.environ, *words)

    def instances(self) -> list[str]:
        """List the engine's jobs or containers."""
        if self.engine is None:
            return []
        if isinstance(self.engine, SlurmCluster):
            return self.engine.jobs("PENDING,RUNNING")
        return self.engine.docker("ps", "--all", "--quiet").split()

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("OPENENV_HOME") == self.environ["OPENENV_HOME"]:
                    yield process

    def titled(self, text: str) -> list[psutil.Process]:
        return [each for each in self.processes() if text in title(each)]

    def left_over(self) -> list[str]:
        """List what is left of the environments after each `down`."""
        runs, deadline = self.layout.runs, time.monotonic() + LEFT_SECONDS
        while True:
            left = [path.name for name in ENVIRONMENTS for path in runs.glob(f"{name}-*")]
            for process in self.processes():
                with suppress(psutil.Error):
                    folder = Path(process.environ().get(RUN_DIR_VARIABLE, "")).name
                    if folder.startswith(ENVIRONMENTS):
                        left.append(f"{process.pid} {title(process)}")
            left += self.instances()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(AGAIN_SECONDS)


@contextmanager
def own_engine(provider: str) -> Iterator[DockerEngine | SlurmCluster | None]:
    """Start an engine for this run, and set the variables that name it; None for local replicas."""
    if provider == "local":
        yield None
        return
    reason = (slurm_engine if provider == "slurm" else docker_engine).why_not()
    if reason is not None:
        raise SystemExit(reason)
    if provider == "slurm":
        with slurm_engine.slurm_cluster(2) as cluster:
            os.environ.update(cluster.environ)
            yield cluster
        return
    with smoke_cache() as cache, docker_engine.docker_engine(cache) as engine:
        os.environ["DOCKER_HOST"] = engine.host
        yield engine


def campaign_arguments(
    description: str, kills: int, short: dict[str, int], **more: dict[str, Any]
) -> argparse.Namespace:
    """Parse the options that all campaigns of kills have; `short` is what `--short` sets."""
    more |= {"provider": {"default": "local", "choices": list(KILLS)}}
    more |= {"kills": {"type": int, "default": kills}, "seed": {"type": int, "default": 1}}
    given = parse_arguments(description, 1, short={"action": "store_true"}, **more)
    vars(given).update(short if given.short else {})
    return given


@contextmanager
def campaign_home(given: argparse.Namespace) -> Iterator[Home]:
    """Start an engine and a daemon for a campaign, in the folder of its environments."""
    with chdir(SOURCE), own_engine(given.provider) as engine, daemon() as environ:
        yield Home(environ, engine)


Kill = Callable[[Home, random.Random], Iterable[str]]  # returns the killed replicas


class Clients(Findings):
    """Sessions of all environments, and the faults of their answers."""

    def __init__(self, urls: dict[str, str], given: argparse.Namespace) -> None:
        super().__init__(given)
        self.urls = urls
        self.generations = {name: {1} for name in urls}  # those that may serve a new session
        self.lost: list[str] = []  # the replicas of sessions that have ended
        self.longest_away = 0.0  # without a session, in seconds

    async def one(self, name: str, chance: random.Random) -> None:
        """Play episodes; after a lost connection continue with a step, as OpenEnv's client does."""
        socket: ClientConnection | None = None
        world, steps = "", 0
        allowed: set[int] = set()
        lost_at: float | None = None
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
                lost_at = lost_at or time.monotonic()
                if socket is not None:
                    assert socket.response is not None
                    self.lost.append(socket.response.headers[REPLICA_HEADER])
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
            if lost_at is not None:
                self.longest_away = max(self.longest_away, time.monotonic() - lost_at)
                lost_at = None
            self._check(name, allowed, found)
            allowed = {int(found["whose"].rpartition("-")[2])}  # a session keeps its generation
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
    found = home.openenv("status")["environments"]
    return [each for environment in found for each in environment["replicas"]]


def running(home: Home) -> list[dict[str, Any]]:
    return [each for each in replicas(home) if each["pid"]]


def exits(home: Home) -> dict[str, Counter[str]]:
    """Count the exits of each replica's processes, by kind."""
    return {each["id"]: Counter(each["exit_kinds"]) for each in replicas(home)}


def kill_replicas(home: Home, chance: random.Random) -> Iterator[str]:
    """Kill several at once, so that they may come back at each other's addresses."""
    found = running(home)
    if not found:
        raise LookupError("no replica has a process")
    for replica in chance.sample(found, min(len(found), chance.randint(1, MAX_AT_ONCE))):
        with suppress(ProcessLookupError):
            os.kill(replica["pid"], signal.SIGKILL)
            yield replica["id"]


def kill_shard(home: Home, chance: random.Random) -> Iterator[str]:
    replica = chance.choice(running(home))  # IndexError: none runs now
    chance.choice(psutil.Process(replica["pid"]).children()).kill()
    yield replica["id"]


def kill_titled(title: str) -> Kill:
    def kill(home: Home, chance: random.Random) -> tuple[()]:
        chance.choice(home.titled(title)).kill()  # IndexError: it has not come back yet
        return ()

    kill.__name__ = f"kill_{title.split()[-1]}"
    return kill


def kill_daemon(home: Home, _: random.Random) -> tuple[()]:
    """Kill the daemon; the next command starts another."""
    os.kill(home.openenv("status")["daemon"]["pid"], signal.SIGKILL)
    return ()


def kill_gateway(home: Home, _: random.Random) -> tuple[()]:
    gateway = home.openenv("gateway", "status")["gateway"] or {}
    os.kill(gateway["pid"], signal.SIGKILL)  # KeyError: none runs, or its pid is not known
    return ()


def restart_engine(home: Home, _: random.Random) -> tuple[()]:
    """Restart the engine, so that containers end and may get each other's addresses."""
    assert isinstance(home.engine, DockerEngine)
    home.engine.live_restore = False
    home.engine.stop()
    home.engine.start()
    return ()


KILLS: dict[str, list[tuple[int, Kill]]] = {
    "local": [(8, kill_replicas), (4, kill_shard), (2, kill_titled("openenvd: shim"))],
    "docker": [(8, kill_replicas), (2, restart_engine), (1, kill_titled("openenvd: agent"))],
    "slurm": [(8, kill_replicas), (1, kill_titled("openenvd: agent"))],
}
OF_ALL: list[tuple[int, Kill]] = [(1, kill_daemon), (1, kill_gateway)]
COSTS_NO_OTHERS = {"kill_replicas", "kill_shard", "kill_agent", "kill_daemon"}


class Campaign:
    """Kills and updates the environments while clients have sessions in them."""

    def __init__(self, home: Home, given: argparse.Namespace, words: list[str]) -> None:
        self._home = home
        self._kills = KILLS[given.provider] + OF_ALL
        # The nodes of a test's cluster have room for one further replica during an update.
        self._words = ["--provider", given.provider, "--gateway", "--memory", MEMORY, *words]
        self._words += ["--set", "max-surge=1"]
        self._generations = dict.fromkeys(ENVIRONMENTS, 0)
        self._may_be_lost: set[str] | None = set()  # replicas, since the last round; None: any
        for name in ENVIRONMENTS:
            self._launch(name)
        self.clients = Clients({name: self._url(name) for name in ENVIRONMENTS}, given)
        self._chance = random.Random(f"{given.seed} {self.clients.kills()}")

    async def run(self, kills: int, sessions: int) -> None:
        """Kill `kills` processes; return when all environments are ready again."""
        async with asyncio.TaskGroup() as group:
            seeds = (self._chance.random() for _ in range(sessions))
            tasks = [
                group.create_task(self.clients.one(name, random.Random(seed)))
                for seed in seeds
                for name in ENVIRONMENTS
            ]
            for number in itertools.count():
                if self.clients.kills() >= kills:
                    break
                await self._kill()
                if number % UPDATE_EVERY == UPDATE_EVERY - 1:
                    await self._update(ENVIRONMENTS[number // UPDATE_EVERY % len(ENVIRONMENTS)])
                self.clients.keep()
            await self._until_ready(*ENVIRONMENTS)
            for task in tasks:
                task.cancel()

    async def _kill(self) -> None:
        if self._chance.random() < MEMORY_SHARE:
            await self._take_memory(self._chance.choice(ENVIRONMENTS))
            return
        weights = [weight for weight, _ in self._kills]
        [(_, kill)] = self._chance.choices(self._kills, weights)
        try:
            before = await asyncio.to_thread(exits, self._home)
            killed = await asyncio.to_thread(lambda: list(kill(self._home, self._chance)))
        # The process has ended, is not known yet, or no daemon answers.
        except (psutil.Error, SystemExit, LookupError, ProcessLookupError) as exc:
            print(f"{kill.__name__}: {exc!r}", file=sys.stderr)
            return
        self.clients.seen[f"{KILLED}{kill.__name__}"] += len(killed) or 1
        await self._check_causes(kill.__name__, before, killed)
        self._check_losses(kill.__name__, killed)
        if not killed:  # if the process that counts exits was killed, its counts start at zero
            await asyncio.sleep(NOTICED_SECONDS)
            await self._until_ready(*ENVIRONMENTS)
        await asyncio.sleep(self._chance.random() * PAUSE_SECONDS)

    async def _check_causes(
        self, kill: str, before: dict[str, Counter[str]], killed: list[str]
    ) -> None:
        """Wait until `status` shows an exit of each killed replica, and none of them for memory."""
        deadline = time.monotonic() + EXPLAINED_SECONDS
        silent = set(killed)
        while silent and time.monotonic() < deadline:
            await asyncio.sleep(AGAIN_SECONDS)
            now = await asyncio.to_thread(exits, self._home)
            silent -= {
                one
                for one in silent
                if one in now and now[one].total() > before.get(one, Counter()).total()
            }
        now = await asyncio.to_thread(exits, self._home)
        self.clients.seen["deaths that were explained"] += len(killed) - len(silent)
        shown = {each["id"]: each for each in await asyncio.to_thread(replicas, self._home)}
        self.clients.wrong += [
            f"{kill}: no exit is shown of {shown[one]}" for one in silent if one in shown
        ]
        self.clients.wrong += [
            f"{kill}: the exit of {one} is said to be for memory"
            for one, kinds in now.items()
            if kinds[FOR_MEMORY] > before.get(one, Counter())[FOR_MEMORY]
        ]

    def _check_losses(self, kill: str, killed: list[str]) -> None:
        """Check that lost sessions belonged to replicas killed in this round or the one before."""
        lost, self.clients.lost = self.clients.lost, []
        now = set(killed) if kill in COSTS_NO_OTHERS else None
        if now is not None and self._may_be_lost is not None:
            elsewhere = set(lost) - now - self._may_be_lost
            self.clients.wrong += [f"{kill}: a session of {each} was lost" for each in elsewhere]
        self._may_be_lost = now

    async def _take_memory(self, name: str) -> None:
        """Let a step exceed the memory limit; `status` and the client must be told of the kill."""
        await self._until_ready(*ENVIRONMENTS)

        async def for_memory() -> set[tuple[str, int]]:
            shown = await asyncio.to_thread(exits, self._home)
            return {(one, kinds[FOR_MEMORY]) for one, kinds in shown.items() if kinds[FOR_MEMORY]}

        before, told = await for_memory(), ""
        try:
            async with connect(self.clients.urls[name], open_timeout=ANSWER_SECONDS) as socket:
                await socket.send(json.dumps({"type": "reset", "data": {}}))
                await socket.recv()
                step = {"type": "step", "data": {"metadata": {"take_memory": True}}}
                await socket.send(json.dumps(step))
                told = str(await asyncio.wait_for(socket.recv(), ANSWER_SECONDS))
        except (OSError, TimeoutError, WebSocketException) as exc:
            told = str(exc)
        deadline = time.monotonic() + EXPLAINED_SECONDS
        while await for_memory() <= before:
            if time.monotonic() > deadline:
                self.clients.wrong.append(
                    f"{name}: no exit for memory is shown; it was told: {told}"
                )
                break
            await asyncio.sleep(AGAIN_SECONDS)
        if "memory" not in told and "killed by the kernel for memory at " not in told:
            self.clients.wrong.append(f"{name}: killed for memory, and its client was told: {told}")
        self.clients.seen[f"{KILLED}for memory"] += 1
        self._check_losses("for memory", [])

    async def _update(self, name: str) -> None:
        """Update an environment: its new replicas have their whole restart budget."""
        await self._until_ready(name)
        updated = self._generations[name] + 1
        allowed = self.clients.generations
        allowed[name] = allowed[name] | {updated}  # a failed update leaves the generation before it
        try:
            await asyncio.to_thread(self._launch, name)
            allowed[name] = {updated}
            self.clients.urls[name] = await asyncio.to_thread(self._url, name)  # another token
        except SystemExit as exc:
            print(exc, file=sys.stderr)
            self.clients.seen["updates that failed"] += 1

    async def _until_ready(self, *names: str) -> None:
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            with suppress(SystemExit):  # a daemon that has just been killed
                found = await asyncio.to_thread(self._home.openenv, "status")
                states = {
                    each["name"]: {replica["state"] for replica in each["replicas"]}
                    for each in found["environments"]
                }
                if all(states.get(name, {""}) <= {"READY", "FAILED"} for name in names):
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
    sessions, replicas = {"type": int, "default": 16}, {"type": int, "default": 3}
    description = "Random kills: are answers from the right world, and causes of death true?"
    given = campaign_arguments(description, 1000, SHORT, sessions=sessions, replicas=replicas)
    with campaign_home(given) as home:
        words = ["--replicas", str(given.replicas)]
        words += ["--token", "auto"] if given.provider == "slurm" else []
        campaign = Campaign(home, given, words)
        asyncio.run(campaign.run(given.kills, given.sessions))
        clients = campaign.clients
        for name in ENVIRONMENTS:
            home.openenv("down", name)
        clients.wrong += [f"left: {each}" for each in home.left_over()]
    report = clients.report(f"worlds, {given.provider}")
    report.add("longest time of a client without a session", "s", [clients.longest_away])
    report.finish(None)
    return 1 if clients.wrong or not clients.seen["answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
