# SPDX-License-Identifier: Apache-2.0
"""The effect on sessions of an update, and of autoscaling.

    python -m load_tests.failures.changing_replicas [--parts updates autoscaling] [--short]

updates: 1,000 clients step once a second. A session lasts for a random number of steps, and then a
new one begins in its place, so that sessions begin, step and end at every moment of an update. When
all have begun, `openenv launch` updates the environment; when the replaced replicas have ended, it
updates the environment again. "Takes over" is the time from the command to the switch; "drained",
the time from the switch until the last replaced replica has ended, which depends on the length of
sessions. A latency counts from the moment at which a step was due.

autoscaling: an environment behind the gateway scales itself under a stepped load, from 1 replica to
8 with 8 slots each, and back. Each level of the load is a number of sessions that is held for some
seconds (`LOADS`); new sessions begin one after another. A session without a free slot waits as long
as the environment allows (`admission-timeout`); then it is refused, and its client tries again
after half a second. When the next level is lower, sessions that are chosen at random end.

Aims: every session is ended by its client, and none is refused; the maximum number of replicas runs
at the top of the load, and one at the end. The seconds until all sessions of a level have begun are
the cost of scaling.
"""

import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.api_client import ApiClient
from load_tests.shared.light_clients import LightSession, open_session
from load_tests.shared.report import Report, daemon, parse_arguments, percentile
from openenvd.rollouts.bench.results import Target

NAME = "changing"
RETRY_SECONDS = 0.5
OPEN_SECONDS = 60.0
ANSWER_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 0.1
SEED = 14
MS = 1e3

SESSIONS, SHORT_SESSIONS = 1_000, 100
UPDATED_REPLICAS = (1, 2)
MAX_STEPS, SHORT_MOST_STEPS = 15, 3  # of a session, a second apart
STEADY_SECONDS, SHORT_STEADY_SECONDS = 5.0, 1.5  # before, between and after

LOADS, SHORT_LOADS = (0, 4, 12, 24, 42, 60, 32, 16, 4, 0), (0, 4, 12, 0)
REPLICAS, SHORT_REPLICAS = 8, 2
SLOTS = 8  # of each replica
HOLD_SECONDS, SHORT_HOLD_SECONDS = 12.0, 4.0
DOWN_SECONDS, SHORT_DOWN_SECONDS = 5.0, 1.0
ARRIVAL_SECONDS = 0.15  # between two sessions that begin
PACE_SECONDS = 0.1
ADMISSION_SECONDS = 20.0
SETTLE_SECONDS = 60.0  # for the replicas that are drained at the end


@dataclass
class Crowd:
    """A wanted number of clients, each of which has one session after the other.

    Attributes:
        target: The environment's address.
        pace_seconds: Time between two steps of a session.
        most_steps: Limit of a session's random number of steps; None: until its client leaves.
    """

    target: Target
    pace_seconds: float
    most_steps: int | None = None
    wanted: int = 0
    open: int = 0  # sessions that have begun, and not ended
    begun: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)  # errors that ended sessions
    latencies: list[float] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    _clients: dict[asyncio.Task[None], asyncio.Event] = field(default_factory=dict)

    def want(self, count: int, apart_seconds: float) -> list[asyncio.Task[None]]:
        """Start or end clients until `count` are left; returns those that are ending."""
        for number in range(count - self.wanted):
            is_over = asyncio.Event()
            client = self._client(is_over, number * apart_seconds)
            self._clients[asyncio.create_task(client)] = is_over
        leaving = self._chance.sample(list(self._clients), max(0, self.wanted - count))
        for task in leaving:
            self._clients.pop(task).set()
        self.wanted = count
        return leaving

    async def _client(self, is_over: asyncio.Event, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        address = (self.target.host, self.target.port, self.target.path)
        while not is_over.is_set():
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    session = await open_session(*address)
            except (OSError, TimeoutError) as exc:
                print(f"refused: {exc!r}", flush=True)
                self.refused += 1
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self.begun += 1
            self.open += 1
            try:
                await self._steps(session, is_over)
            except (OSError, TimeoutError) as exc:
                self.lost.append(repr(exc))
            self.open -= 1
            session.end()

    async def _steps(self, session: LightSession, is_over: asyncio.Event) -> None:
        due = time.monotonic()
        most = self.most_steps
        for _ in itertools.count() if most is None else range(self._chance.randint(1, most)):
            due += self.pace_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if is_over.is_set():
                return
            async with asyncio.timeout(ANSWER_SECONDS):
                self.latencies.append(await session.step(due))

    def taken(self) -> list[float]:
        found, self.latencies = self.latencies, []
        return found


async def update(report: Report, environ: dict[str, str], replicas: int, options: Any) -> Crowd:
    sessions = SHORT_SESSIONS if options.short else SESSIONS
    steady = SHORT_STEADY_SECONDS if options.short else STEADY_SECONDS
    words = ["launch", "benchmark", "--name", NAME, "--replicas", str(replicas)]
    words += ["--max-sessions", str(4 * sessions)]
    launched = await asyncio.to_thread(openenv, environ, *words)
    target = Target(NAME, launched["environment"]["address"])
    crowd = Crowd(target, 1.0, SHORT_MOST_STEPS if options.short else MAX_STEPS)
    crowd.want(sessions, 1 / sessions)
    await asyncio.sleep(steady)
    what = f"{sessions:,} sessions, {replicas} replica{'s' * (replicas > 1)}"

    def note_steps(when: str) -> None:
        if steps := crowd.taken():
            report.append(f"{what}: step P99, {when}", "ms", MS * percentile(steps, 0.99))
            report.append(f"{what}: longest step, {when}", "ms", MS * max(steps))

    note_steps("before")
    for number, kind in enumerate(("first update", "second update")):
        began = time.monotonic()
        await asyncio.to_thread(openenv, environ, *words)
        await _until(environ, number + 2, "SERVING")
        switched = time.monotonic()
        report.append(f"{what}: {kind} takes over", "s", switched - began)
        await _until(environ, number + 1, "RETIRED")
        report.append(f"{what}: {kind}, drained", "s", time.monotonic() - switched)
        note_steps(kind)
        await asyncio.sleep(steady)
    note_steps("after")
    await asyncio.gather(*crowd.want(0, 0.0))
    report.append(f"{what}: begun", "", crowd.begun)
    report.append(f"{what}: dropped or refused (aim 0)", "", len(crowd.lost) + crowd.refused)
    return crowd


async def _until(environ: dict[str, str], number: int, state: str) -> None:
    while True:
        found = await asyncio.to_thread(openenv, environ, "status", NAME)
        history = found["environments"][0]["generations"]
        if any(each["number"] == number and each["state"] == state for each in history):
            return
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


def updates(report: Report, options: Any) -> bool:
    """Update one and two replicas; returns whether every session was kept and admitted."""
    crowds = []
    for replicas in UPDATED_REPLICAS[:1] if options.short else UPDATED_REPLICAS:
        with daemon() as environ:
            crowds.append(asyncio.run(update(report, environ, replicas, options)))
    for why in sorted({why for crowd in crowds for why in crowd.lost}):
        report.note(f"dropped: {why}")
    return not any(crowd.lost or crowd.refused for crowd in crowds)


async def scale(report: Report, address: str, home: str, short: bool) -> tuple[Crowd, int, int]:
    """Play the load; returns the clients, the most ready replicas, and the replicas at the end."""
    loads = SHORT_LOADS if short else LOADS
    hold = SHORT_HOLD_SECONDS if short else HOLD_SECONDS
    crowd, api = Crowd(Target(NAME, address), PACE_SECONDS), ApiClient(home)
    seen = [(0, 0)]  # replicas that were ready; ready or draining

    async def sample() -> None:
        while True:
            environment = await api.environment(NAME)
            states = Counter(replica["state"] for replica in environment["replicas"])
            seen.append((states["READY"], states["READY"] + states["DRAINING"]))
            await asyncio.sleep(5 * POLL_INTERVAL_SECONDS)

    sampling = asyncio.create_task(sample())
    filled = []
    for count in loads:
        began = time.monotonic()
        crowd.want(count, ARRIVAL_SECONDS)
        while crowd.open < count:
            await asyncio.sleep(0.01)
        filled.append(time.monotonic() - began)
        await asyncio.sleep(max(0.0, began + hold - time.monotonic()))
    deadline = time.monotonic() + SETTLE_SECONDS
    while seen[-1][1] > 1 and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    sampling.cancel()
    await asyncio.wait({sampling})
    await api.close()
    report.append("until all sessions of a step were there", "s", max(filled))
    return crowd, max(ready for ready, _ in seen), seen[-1][1]


def autoscaling(report: Report, options: Any) -> bool:
    """Play the load; returns whether the aims are met."""
    most = SHORT_REPLICAS if options.short else REPLICAS
    down = SHORT_DOWN_SECONDS if options.short else DOWN_SECONDS
    words = ["launch", "benchmark", "--name", NAME, "--gateway", "--shards", "1"]
    words += ["--max", str(most)]
    words += ["--max-sessions", str(SLOTS * most), "--set", f"scale-down={down}"]
    words += ["--set", f"admission-timeout={ADMISSION_SECONDS}"]
    with daemon() as environ:
        address = openenv(environ, *words)["environment"]["address"]
        played = scale(report, address, environ["OPENENV_HOME"], options.short)
        crowd, top, last = asyncio.run(played)
    report.append("replicas at the most", "", top)
    report.append("replicas at the end", "", last)
    report.append("sessions lost (aim 0)", "", len(crowd.lost))
    report.append("clients refused (aim 0)", "", crowd.refused)
    for why in sorted(set(crowd.lost)):
        report.note(f"lost: {why}")
    # In a run of seconds, other work on the machine can cause a refusal.
    is_refused = bool(crowd.refused) and not options.short
    return not crowd.lost and not is_refused and (top, last) == (most, 1)


PARTS = {"updates": updates, "autoscaling": autoscaling}


def main() -> int:
    options = parse_arguments(
        "Sessions while replicas change.",
        1,
        parts={"nargs": "+", "choices": list(PARTS), "default": list(PARTS)},
        short={"action": "store_true", "help": "seconds instead of minutes"},
    )
    report = Report("Sessions while replicas change")
    runs = [PARTS[part] for part in options.parts for _ in range(options.repetitions)]
    outcomes = [run(report, options) for run in runs]
    report.finish(options.json)
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
