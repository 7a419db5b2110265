# SPDX-License-Identifier: Apache-2.0
"""What is killed under stepping sessions, what that costs, and how soon it is made good.

    python -m load_tests.failures.failover [--provider local] [--sessions 2000] [--replicas 4]
        [--short] [--gateway] [--victims shard replica shim agent daemon engine gateway node cut]

For each victim, as often as `--repetitions` says: so many sessions step at a pace; then it is
killed (SIGKILL), and an engine is started again. With `--provider docker` it is a dockerd of its
own, with live restore; with `--provider slurm` a cluster with a node for each replica and one more,
whose last one is in a network namespace of its own. There the `node` is killed with all that it
runs, or `cut` off, so that its replica goes on, and is joined again when the replica is back
elsewhere: what it still runs of it has to end. Lost may be the sessions of the replica that died,
or of the gateway, and no others; each client says what it was told before its connection ended, an
error where somebody is left to send one: of a shard its supervisor, of a replica the gateway. It
has a session again within five seconds, and whoever comes anew while a node is lost within ten.
After each, the environment has as many replicas as before, and no process or container more; after
its `down` nothing of it is left. Exit code 1: any of this was not so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.light_clients import playing
from load_tests.shared.report import Report, daemon, parse_arguments
from openenvd.client.errors import SessionError
from openenvd.client.session import Session
from openenvd.environments.engines.providers import RUN_DIR_VARIABLE
from openenvd.environments.shim.client import read_status_file
from openenvd.schema.layout import Layout
from smoke_tests.conftest import smoke_cache
from smoke_tests.engines import slurm_engine
from smoke_tests.engines.docker_engine import DockerEngine, docker_engine, why_not
from smoke_tests.engines.slurm_engine import SlurmCluster, slurm_cluster

NAME = "crowd"
PACE_SECONDS = 1.0
COME_SECONDS = 0.2  # between two newcomers
NEWCOMERS = 8  # that may have a session at a time, at each replica
SETTLE_SECONDS = 5.0  # for sessions to be lost, and to come back
READY_SECONDS = 90.0
AGAIN_SECONDS = 5.0  # until all have a session again
NEW_SECONDS = 10.0  # until those who come while a node is lost have one
FENCE_SECONDS = 30.0  # for what a node still runs of a replica that is elsewhere to end
LEFT_SECONDS = 10.0  # for what was stopped to be gone
TOLD = ("SESSION_ERROR", "close 1011")  # the latter where its replica says nothing any more
EVERY = "every replica"  # for what takes all sessions with it
LOCAL_VICTIMS = ("shard", "replica", "shim", "daemon")
VICTIMS_OF = {
    "local": LOCAL_VICTIMS,
    "docker": ("replica", "agent", "daemon", "engine"),
    "slurm": ("replica", "agent", "daemon", "cut", "node"),
}
NODES = ("cut", "node")
ALONE_ON_A_NODE = ["--cpus", "3", "--memory", "2G", "--token", "auto"]
SHORT = {"sessions": 200, "replicas": 2}


@dataclass(frozen=True)
class Home:
    """A daemon's home, with one environment in it."""

    environ: dict[str, str]
    provider: str
    engine: DockerEngine | SlurmCluster | None
    has_gateway: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(Path(self.environ["OPENENV_HOME"]))

    def openenv(self, *words: str) -> Any:
        return openenv(self.environ, *words)

    def environment(self) -> dict[str, Any]:
        """The environment, as `openenv status` has it."""
        found: dict[str, Any] = self.openenv("status", NAME)["environments"][0]
        return found

    def wait_until_ready(self, died: dict[str, Any] | None = None) -> None:
        """Wait until all replicas are ready, with another process in place of the one that died."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            seen = self.environment()
            is_old = died is not None and died["pid"] in [each["pid"] for each in seen["replicas"]]
            if seen["state"] == "READY" and not is_old:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{NAME} is not ready again: {seen['state']}, {seen['error']}")
            time.sleep(0.1)

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get("OPENENV_HOME") == self.environ["OPENENV_HOME"]:
                    yield process
            except psutil.Error:
                continue

    @property
    def base_url(self) -> str:
        return str(self.openenv("address", NAME)["base_url"])

    @property
    def cluster(self) -> SlurmCluster:
        assert isinstance(self.engine, SlurmCluster)
        return self.engine

    def instances(self) -> list[str]:
        if self.engine is None:
            return []
        if isinstance(self.engine, SlurmCluster):
            return self.engine.jobs("PENDING,RUNNING")
        return self.engine.docker("ps", "--all", "--quiet").split()

    def titled(self, title: str) -> list[psutil.Process]:
        return [each for each in self.processes() if title in " ".join(each.cmdline())]

    def kill_daemon(self) -> None:
        """`kill -9` the daemon; the next command starts another."""
        os.kill(self.openenv("status")["daemon"]["pid"], signal.SIGKILL)

    def kill_gateway(self) -> None:
        """`kill -9` Envoy.

        Raises:
            KeyError: No gateway runs, or its pid is not known.
        """
        gateway = self.openenv("gateway", "status")["gateway"] or {}
        os.kill(gateway["pid"], signal.SIGKILL)


# Each kills something, and returns the replica that died with it.
Kill = Callable[[Home, dict[str, Any]], str | None]


def kill_replica(home: Home, replica: dict[str, Any]) -> str | None:
    os.kill(replica["pid"], signal.SIGKILL)
    return str(replica["id"])


def kill_shim(home: Home, replica: dict[str, Any]) -> str | None:
    """The process above a local replica, which ends with it."""
    status = read_status_file(home.layout.run_dir(replica["id"]))
    assert status is not None
    os.kill(status["shim"]["pid"], signal.SIGKILL)
    return str(replica["id"])


def kill_shard(home: Home, replica: dict[str, Any]) -> str | None:
    """One process of a replica that serves sessions: not all of these are its."""
    children = psutil.Process(replica["pid"]).children()
    max(children, key=lambda each: each.memory_info().rss).kill()
    return str(replica["id"])


def kill_agent(home: Home, replica: dict[str, Any]) -> str | None:
    [agent] = home.titled(f"openenvd: agent {home.provider}")
    agent.kill()
    return None


def kill_daemon(home: Home, replica: dict[str, Any]) -> str | None:
    home.kill_daemon()
    return None


def kill_engine(home: Home, replica: dict[str, Any]) -> str | None:
    assert isinstance(home.engine, DockerEngine)
    home.engine.kill()
    home.engine.start()
    return None


def kill_node(home: Home, replica: dict[str, Any]) -> str | None:
    home.cluster.kill_node()
    return str(replica["id"])


def cut_node(home: Home, replica: dict[str, Any]) -> str | None:
    """A node's network; its replica goes on."""
    home.cluster.cut()
    return str(replica["id"])


def kill_gateway(home: Home, replica: dict[str, Any]) -> str | None:
    home.kill_gateway()
    return EVERY


VICTIMS: dict[str, Kill] = {
    "shard": kill_shard,
    "replica": kill_replica,
    "shim": kill_shim,
    "agent": kill_agent,
    "daemon": kill_daemon,
    "engine": kill_engine,
    "gateway": kill_gateway,
    "node": kill_node,
    "cut": cut_node,
}


def on_the_last_node(home: Home) -> str:
    """The id of the replica there; the next job goes there, where there is none."""
    node = home.cluster.nodes[-1]
    if not home.cluster.run("squeue", "--noheader", f"--nodelist={node}", "--states=RUNNING"):
        home.cluster.wait_until_idle(node)
        first = home.environment()["replicas"][0]
        home.openenv("restart", NAME, "--replica", str(first["ordinal"]))
    for replica in home.environment()["replicas"]:
        folder = home.layout.run_dir(replica["id"])
        job = json.loads((folder / "slurm.json").read_bytes())["job"]
        if json.loads((folder / f"slurm-{job}.json").read_bytes())["node"] == node:
            return str(replica["id"])
    raise SystemExit(f"no replica is on {node}")


def bring_back(home: Home, victim: str) -> list[str]:
    """Have the node again; what is wrong: what it still runs."""
    cluster = home.cluster
    if victim == "node":
        cluster.start_node(cluster.nodes[-1])
    else:
        cluster.join()
    deadline = time.monotonic() + FENCE_SECONDS
    while left := cluster.replicas_there():
        if time.monotonic() > deadline:
            return [f"{victim}: the node still runs {' '.join(_words(each))}" for each in left]
        time.sleep(0.2)
    return []


def has_session(base_url: str) -> bool:
    """Whether a session can begin, by trying once."""
    try:
        with Session(base_url, READY_SECONDS, READY_SECONDS) as session:
            session.reset()
            return True
    except SessionError:
        return False


@contextmanager
def newcomers(base_url: str) -> Iterator[list[float]]:
    """Clients that come one after the other; how long each has waited for its first answer."""
    seconds: list[float] = []
    is_over = threading.Event()

    def come() -> None:
        while not is_over.wait(COME_SECONDS):
            began = time.monotonic()
            while not has_session(base_url):
                time.sleep(COME_SECONDS)
            seconds.append(time.monotonic() - began)

    thread = threading.Thread(target=come, name="newcomers")
    thread.start()
    try:
        yield seconds
    finally:
        is_over.set()
        thread.join()


@dataclass
class Loss:
    """What was seen when something was killed.

    Attributes:
        before: The replica that had the most sessions, or that was on the node.
        died: Whose sessions may be lost; None: nobody's.
        killed_at: On the monotonic clock.
        ready_seconds: Until all was ready again.
        found: What the clients have seen.
        waited: How long each of those who came meanwhile waited.
        wrong: What a node still runs.
    """

    before: dict[str, Any]
    died: str | None
    killed_at: float
    ready_seconds: float
    found: Any
    waited: list[float]
    wrong: list[str]


def kill(home: Home, victim: str, sessions: int) -> Loss:
    base_url, is_node = home.base_url, victim in NODES
    there = on_the_last_node(home) if is_node else None
    wrong: list[str] = []
    parts = urlsplit(base_url)
    path = f"{parts.path}?{parts.query}".rstrip("?")
    address = (parts.hostname or "", parts.port or 80, path)
    with playing(*address, sessions, PACE_SECONDS) as clients:
        time.sleep(2 * PACE_SECONDS)
        replicas = home.environment()["replicas"]
        before = max(replicas, key=lambda each: (each["id"] == there, int(each["sessions"])))
        coming: AbstractContextManager[list[float]] = contextlib.nullcontext([])
        if is_node:
            coming = newcomers(base_url)
        killed_at = time.monotonic()
        died = VICTIMS[victim](home, before)
        with coming as waited:
            home.wait_until_ready(before if victim in ("replica", "shim", *NODES) else None)
        ready_seconds = time.monotonic() - killed_at
        if is_node:
            wrong = bring_back(home, victim)
        time.sleep(SETTLE_SECONDS)
        clients.tell("end")
        found = clients.hear()
    return Loss(before, died, killed_at, ready_seconds, found, waited, wrong)


def try_victim(report: Report, home: Home, victim: str, sessions: int) -> list[str]:
    """Kill it under the sessions of the environment; add what was found, return what is wrong."""
    held_before = what_it_has(home)
    loss = kill(home, victim, sessions)
    before, died, killed_at, found = loss.before, loss.died, loss.killed_at, loss.found
    wrong = loss.wrong
    if victim in NODES:
        report.append(f"{victim}: newcomers", "", len(loss.waited))
        longest = max(loss.waited, default=READY_SECONDS)
        report.append(f"{victim}: longest that one waited", "s", longest)
        wrong += [f"{victim}: a new session took {longest:.1f} s"] * (longest > NEW_SECONDS)
    lost = found["lost"]
    elsewhere = [each for each in lost if died not in (each["replica"], EVERY)]
    report.append(f"{victim}: sessions lost", "", len(lost))
    if died is not None:
        had = sessions if died == EVERY else before["sessions"]
        report.append(f"{victim}: sessions that it had", "", had)
    report.append(f"{victim}: sessions lost elsewhere", "", len(elsewhere))
    told = Counter(each["told"] for each in lost)
    for how, count in told.most_common():
        report.append(f"  {victim}: told by {how!r}", "", count)
    back = [each.get("back_after_seconds") for each in lost]
    if back:
        report.append(f"{victim}: still without a session", "", back.count(None))
        seconds = [each["at"] - killed_at + each["back_after_seconds"] for each in lost
                   if "back_after_seconds" in each]  # fmt: skip
        report.append(f"{victim}: last session back after the kill", "s", max(seconds, default=0.0))
    report.append(f"{victim}: all ready again after", "s", loss.ready_seconds)
    report.append(f"{victim}: steps answered", "", found["steps"])
    if elsewhere:
        wrong.append(f"{victim}: {len(elsewhere)} sessions were lost elsewhere")
    wrong += late(victim, lost, killed_at)
    in_silence = len(lost) - sum(told[how] for how in TOLD)
    if in_silence and (victim == "shard" or (home.has_gateway and died != EVERY)):
        wrong.append(f"{victim}: {in_silence} sessions ended without an error")
    held = eventually_has(home, held_before)
    if held != held_before:
        wrong.append(f"{victim}: it has {dict(held)}, and had {dict(held_before)}")
    return wrong


def late(victim: str, lost: list[dict[str, Any]], killed_at: float) -> list[str]:
    """Those who have no session again in time: since the kill, or since a cut was told to them."""
    back = [each.get("back_after_seconds") for each in lost]
    if back.count(None):
        return [f"{victim}: {back.count(None)} clients are still without a session"]
    seconds = [each["back_after_seconds"] for each in lost]
    if victim != "cut":
        seconds = [each["at"] - killed_at + each["back_after_seconds"] for each in lost]
    if max(seconds, default=0.0) > AGAIN_SECONDS:
        return [f"{victim}: a client had no session for {max(seconds):.1f} s"]
    return []


def what_it_has(home: Home) -> Counter[str]:
    """What there is of the environment: run folders, sockets, containers; the gateway's, too."""
    return Counter(
        folders=len(list(home.layout.runs.iterdir())),
        sockets=len(list(home.layout.sockets.iterdir())),
        instances=len(home.instances()),
        shims=sum("openenvd: shim" in " ".join(_words(each)) for each in home.processes()),
        agents=sum("openenvd: agent" in " ".join(_words(each)) for each in home.processes()),
    )


def eventually_has(home: Home, wanted: Counter[str]) -> Counter[str]:
    """What there is of it, once that is what is wanted, or after some time."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := what_it_has(home)) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def left_over(home: Home) -> list[str]:
    """What is left of the environment after its `down`: processes and run files."""
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        left = [path.name for path in home.layout.runs.glob(f"{NAME}-*")]
        for process in home.processes():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                is_its = Path(process.environ().get(RUN_DIR_VARIABLE, "")).name.startswith(NAME)
                if is_its or f"{NAME}-" in words:
                    left.append(f"{process.pid} {words}")
        left += home.instances()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


@contextmanager
def own_engine(provider: str, replicas: int = 1) -> Iterator[DockerEngine | SlurmCluster | None]:
    """An engine of one's own, which this process's variables name; None for local replicas."""
    if provider == "local":
        yield None
        return
    reason = slurm_engine.why_no_other_node() if provider == "slurm" else why_not()
    if reason is not None:
        raise SystemExit(reason)
    if provider == "slurm":
        with slurm_cluster(replicas + 1, other=True) as cluster:
            os.environ.update(cluster.environ)
            yield cluster
        return
    with smoke_cache() as cache, docker_engine(cache) as engine:
        os.environ["DOCKER_HOST"] = engine.host
        yield engine


def main() -> int:
    given = parse_arguments(
        "What is killed under stepping sessions, and what that costs.",
        1,
        provider={"default": "local"},
        gateway={"action": "store_true"},
        sessions={"type": int, "default": 2000},
        replicas={"type": int, "default": 4},
        victims={"nargs": "*", "choices": list(VICTIMS)},
        short={"action": "store_true"},
    )
    if given.short:
        vars(given).update(SHORT)
    victims = given.victims or VICTIMS_OF[given.provider]
    crowd = f"{given.sessions} sessions, {given.replicas} replicas"
    report = Report(f"failover, {given.provider}: {crowd}")
    victims = [*victims, *(["gateway"] if given.gateway and not given.victims else [])]
    with own_engine(given.provider, given.replicas) as engine, daemon() as environ:
        is_slurm = given.provider == "slurm"
        home = Home(environ, given.provider, engine, given.gateway or is_slurm)
        words = ["--provider", given.provider, "--replicas", str(given.replicas)]
        words += ["--gateway"] if home.has_gateway else []
        words += ALONE_ON_A_NODE if is_slurm else []
        # For those who come back while a replica is away, and who come anew meanwhile.
        room = str(2 * given.sessions + NEWCOMERS * given.replicas)
        home.openenv("launch", "benchmark", "--name", NAME, "--max-sessions", room, *words)
        wrong: list[str] = []
        for victim in [each for each in victims for _ in range(given.repetitions)]:
            home.wait_until_ready()
            wrong += try_victim(report, home, victim, given.sessions)
        home.openenv("down", NAME)
        left = left_over(home)
        report.add("left after its down", "", [len(left)])
        wrong += [f"left: {each}" for each in left]
    for each in wrong:
        report.note(each)
    report.finish(given.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
