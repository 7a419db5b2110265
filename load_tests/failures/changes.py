# SPDX-License-Identifier: Apache-2.0
"""Random kills while replicas change: once all has settled, the wanted replicas are what runs.

    python -m load_tests.failures.changes [--provider local|docker|slurm] [--kills 2000]
                                [--seed 1] [--short] [--json FILE]

Each round submits a change of one environment: `launch`, an update, `scale`, `restart` or `down`;
or it changes the number of sessions of an environment that scales itself. Within three seconds a
process is killed (SIGKILL): the daemon, a worker, a shim, an agent, a server or Envoy. Then the
round waits until the request has ended and nothing changes any more. These counts have to be zero:

    not settled                 after two minutes something still starts, drains or is missing
    another number              a request succeeded without leaving the number that it asked for,
                                or failed and changed the number
    something is left           a process, container, job or run folder without a wanted replica
    another route               the gateway routes to more or fewer replicas than are wanted
    a session of a healthy replica has ended      the replica still runs, and Envoy was not killed
    a request lost, or final more than once       by the events of its row

Otherwise the exit code is 1. After each round the results are written to the JSON file, and a later
call with the same file continues until `--kills` processes were killed.
"""

import argparse
import asyncio
import json
import random
import signal
import sqlite3
import sys
import time
from contextlib import closing, suppress
from typing import Any

import psutil

from load_tests.envs_for_load.world_environment import replica_mark
from load_tests.failures.worlds import Home, campaign_arguments, campaign_home
from load_tests.shared.api_client import FINAL
from load_tests.shared.report import KILLED, Findings
from openenvd.client import AsyncSession, SessionError

CHANGED, SCALED = ("one", "two"), "scaled"
MAX_REPLICAS, SLOTS = 3, 4
SESSIONS = 4  # of each environment that requests change
KILL_SECONDS = 3.0  # at most, after the change was submitted
SETTLE_SECONDS = 120.0
POLL_INTERVAL_SECONDS = 0.3
PAUSE_SECONDS = 0.2  # of a session, between two steps
EPISODE_STEPS = 40
ANSWER_SECONDS = 60.0
DRAIN = "drain-timeout=1s"
SETTLED = ("READY", "FAILED")  # states of replicas; the latter spent its restarts
TITLES = {
    "local": ("daemon", "worker", "shim", "host", "gateway"),
    "docker": ("daemon", "worker", "agent", "host", "gateway"),
    "slurm": ("daemon", "worker", "agent", "host", "gateway"),
}
SHORT = {"kills": 12}


class Sessions:
    """Sessions of one environment that step all the time, and the replicas that ended sessions."""

    def __init__(self) -> None:
        self.address = ""  # empty: no session begins
        self.ended: list[str] = []  # the replicas, by their marks
        self.answers = 0
        self._tasks: list[asyncio.Task[None]] = []

    def hold(self, count: int) -> None:
        """Hold this number of sessions from now on."""
        for task in self._tasks[count:]:
            task.cancel()
        self._tasks = self._tasks[:count]
        self._tasks += [asyncio.create_task(self._play()) for _ in range(count - len(self._tasks))]

    async def _play(self) -> None:
        while True:
            mark = ""
            with suppress(SessionError):  # also without an address
                async with AsyncSession(self.address, answer_timeout=ANSWER_SECONDS) as session:
                    answer = await session.reset()
                    for _ in range(EPISODE_STEPS):
                        mark = answer.observation["replica"]
                        self.answers += 1
                        await asyncio.sleep(PAUSE_SECONDS)
                        answer = await session.step({})
                    mark = ""
            if mark:
                self.ended.append(mark)
            await asyncio.sleep(PAUSE_SECONDS)


class Campaign(Findings):
    """The environments, their sessions, and the faults that were found."""

    def __init__(self, home: Home, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.home = home
        self._provider = given.provider
        self._chance = random.Random(f"{given.seed} {sum(self.seen.values())}")
        self._wanted = dict.fromkeys(CHANGED, 0)
        self._sessions = {name: Sessions() for name in (*CHANGED, SCALED)}

    async def run(self, kills: int) -> None:
        """Change and kill until this number of processes was killed."""
        limits = ["--min", "1", "--max", str(MAX_REPLICAS), "--set", "scale-down=1s"]
        limits += ["--max-sessions", str(MAX_REPLICAS * SLOTS)]
        await self._openenv("launch", *self._launch_words(SCALED), *limits)
        await self._note_addresses()
        for name in CHANGED:
            self._sessions[name].hold(SESSIONS)
        while self.kills() < kills:
            await self._round()
            self.keep()
        for each in self._sessions.values():
            each.hold(0)

    def _launch_words(self, name: str) -> list[str]:
        words = ["world_environment:WorldEnvironment", "--name", name, "-e", f"WHOSE={name}-1"]
        words += ["--provider", self._provider, "--gateway", "--set", DRAIN, "--memory", "400M"]
        return words + (["--token", "auto"] if self._provider == "slurm" else [])

    async def _openenv(self, *words: str) -> Any:
        return await asyncio.to_thread(self.home.openenv, *words)

    async def _note_addresses(self) -> None:
        for name, sessions in self._sessions.items():
            sessions.address = ""
            with suppress(SystemExit):
                sessions.address = (await self._openenv("address", name))["base_url"]

    async def _round(self) -> None:
        before = await self._marks()
        name = self._chance.choice((*CHANGED, SCALED))
        request_id, asked = None, None
        if name == SCALED:
            self._sessions[SCALED].hold(self._chance.randrange(MAX_REPLICAS * SLOTS))
            self.seen["changes: sessions"] += 1
        else:
            words, asked = self._change(name)
            self.seen[f"changes: {words[0]}"] += 1
            answer = await self._openenv(*words, "--async")
            [request_id] = answer.get("request_ids") or [answer["request_id"]]
        await asyncio.sleep(self._chance.random() * KILL_SECONDS)
        killed, mark = await asyncio.to_thread(self._kill)
        await self._settle(name, request_id, asked, killed)
        await self._note_addresses()
        after = await self._marks()
        for each in self._sessions.values():
            ended, each.ended = each.ended, []
            lost = (before & after & set(ended)) - {mark}
            if lost and killed != "gateway":
                text = f"sessions of {lost} ended after {killed} was killed"
                self.wrong.append(f"{text}: {request_id}")
            self.seen["answers"] += each.answers
            each.answers = 0

    def _change(self, name: str) -> tuple[list[str], int]:
        """Draw a change; return its command, and the number of replicas that it asks for."""
        wanted, count = self._wanted[name], self._chance.randint(1, MAX_REPLICAS)
        launch = ["launch", *self._launch_words(name), "--replicas", str(count)]
        kind = self._chance.choice(("launch", "scale", "restart", "down")) if wanted else "launch"
        match kind:
            case "launch":
                return launch, count
            case "scale":
                return ["scale", name, str(count)], count
            case "restart":
                return ["restart", name], wanted
            case _:
                return ["down", name], 0

    def _kill(self) -> tuple[str | None, str | None]:
        """Kill a process of a kind; return the kind, and the mark of a replica's server."""
        title = self._chance.choice(TITLES[self._provider])
        with suppress(psutil.Error, OSError, IndexError, SystemExit):  # none is there any more
            if title == "host":
                found = [psutil.Process(pid) for pid in self._pids()]
            else:
                found = self.home.titled(f"openenvd: {title}")
            process = self._chance.choice(found)
            mark = replica_mark(process.pid) if title == "host" else None
            process.send_signal(signal.SIGKILL)
            self.seen[f"{KILLED}{title}"] += 1
            return title, mark
        return None, None

    def _pids(self) -> list[int]:
        shown = self.home.openenv("status")["environments"]
        return [each["pid"] for one in shown for each in one["replicas"] if each["pid"]]

    async def _marks(self) -> set[str]:
        """The marks of all replicas that have a process."""
        with suppress(SystemExit, OSError):
            return set(map(replica_mark, await asyncio.to_thread(self._pids)))
        return set()

    async def _settle(
        self, name: str, request_id: str | None, asked: int | None, killed: str | None
    ) -> None:
        """Wait until nothing changes any more; record what is wrong then."""
        deadline, why = time.monotonic() + SETTLE_SECONDS, ["nothing is known"]
        state = None
        while why and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            try:
                why = await asyncio.to_thread(self._differences)  # it starts the daemon again
                if request_id is not None:
                    [(state,)] = self._query("SELECT state FROM requests WHERE id = ?", request_id)
                    why += [] if state in FINAL else [f"it is {state}"]
            except (SystemExit, psutil.Error) as exc:
                why = [str(exc)]
        self.wrong += [
            f"not settled after {killed} was killed, {request_id}: {each}" for each in why
        ]
        if request_id is None or asked is None:
            return
        self.seen[f"requests: {state}"] += 1
        wanted, before = self._rows().get(name, 0), self._wanted[name]
        if wanted != (asked if state == "SUCCEEDED" else before):
            self.wrong.append(f"{request_id} is {state}: {wanted} replicas, {before=}, {asked=}")
        self._wanted[name] = wanted
        finals = self._finals(request_id)
        if finals != 1:
            self.wrong.append(f"{request_id} has {finals} events of its end")

    def _differences(self) -> list[str]:
        """Describe each difference between what is wanted and what is there."""
        home, wanted, found = self.home, self._rows(), []
        shown = {each["name"]: each for each in home.openenv("status")["environments"]}
        gateway = home.openenv("gateway", "status")["gateway"] or {"environments": []}
        routed = {each["name"]: each["replicas"] for each in gateway["environments"]}
        for name, count in wanted.items():
            states = [each["state"] for each in shown.get(name, {}).get("replicas", ())]
            if len(states) != count or not set(states) <= set(SETTLED):
                found.append(f"{name}: {count} replicas are wanted, {states} are there")
            ready = states.count("READY")
            healthy = [r["is_healthy"] for r in routed.get(name, ()) if not r["is_draining"]]
            if len(healthy) != ready or not all(healthy):
                found.append(f"{name}: {ready} replicas are ready, the gateway has {healthy}")
        every = sum(wanted.values())
        folders = list(home.layout.runs.glob("*/replica.json"))
        here = len([each for each in folders if each.parent.name != "gateway"])
        if here != every:
            found.append(f"{every} replicas are wanted, {here} run folders are there")
        instances: list[Any] = home.instances()
        if home.engine is None:
            hosts = home.titled("openenvd: host")  # or what these have forked
            instances = [each for each in hosts if each.name().startswith("host")]
        if len(instances) != every:
            found.append(f"{every} replicas are wanted, {instances} are there")
        return found

    def _query(self, text: str, *values: str) -> list[Any]:
        address = f"file:{self.home.layout.home}/requests.db?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            return database.execute(text, values).fetchall()

    def _rows(self) -> dict[str, int]:
        """Return how many replicas each environment wants, unless its launch has failed."""
        text = (
            "SELECT name, spec FROM environments WHERE state IN ('READY', 'DEGRADED') OR"
            " state = 'FAILED' AND name IN (SELECT environment FROM replicas)"
        )
        specs = {name: json.loads(spec) for name, spec in self._query(text)}
        return {
            name: max(spec.get("replicas") or 1, spec.get("min_replicas") or 1)
            for name, spec in specs.items()
        }

    def _finals(self, request_id: str) -> int:
        """Count the events that say that a request has ended."""
        text = "SELECT data FROM events WHERE kind = 'request.state' AND request_id = ?"
        return sum(
            json.loads(data).get("state") in FINAL for (data,) in self._query(text, request_id)
        )


def main() -> int:
    given = campaign_arguments("Kills at random while replicas are changed.", 2000, SHORT)
    with campaign_home(given) as home:
        campaign = Campaign(home, given)
        asyncio.run(campaign.run(given.kills))
    campaign.report(f"changes, {given.provider}").finish(None)
    return 1 if campaign.wrong or not campaign.seen["answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
