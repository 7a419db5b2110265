# SPDX-License-Identifier: Apache-2.0
"""Rolling updates under stepping sessions: none may be dropped.

    python -m load_tests.rolling_update [--json FILE]      1,000 sessions, 1 and 2 replicas
    python -m load_tests.rolling_update --short            100 sessions

So many clients step once a second. A session lasts for a random number of steps, and a new one
begins in its place, so that sessions begin, go on and end at every moment of an update. When all
have begun, `openenv launch` updates the environment; when what that replaced has ended, it does so
again. Every failed connection, handshake, reset and step counts, and none is tried again.

"Takes over" is from the command to the switch; "drained", from there until the last of the replaced
replicas has ended, which is a matter of how long sessions last. A latency counts from the moment at
which a step was due.

Aims: no session dropped, none refused.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.light_session import LightSession, open_session
from load_tests.shared.report import Report, daemon, parse_arguments, percentile
from openenvd.rollouts.bench.target import Target

SESSIONS, SHORT_SESSIONS = 1_000, 100
REPLICAS = (1, 2)
MOST_STEPS, SHORT_MOST_STEPS = 15, 3  # of a session, a second apart
STEADY_SECONDS, SHORT_STEADY_SECONDS = 5.0, 1.5  # before, between and after
LOOK_SECONDS = 0.1
ANSWER_SECONDS = 30.0
NAME = "rolling"
MS = 1e3


@dataclass
class Crowd:
    """Clients that step, each in one session after the other."""

    target: Target
    clients: int
    most_steps: int
    begun: int = 0
    failures: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    is_ending: bool = False

    async def run(self) -> None:
        """Until `is_ending`."""
        await asyncio.gather(*(self._client(number) for number in range(self.clients)))

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        await asyncio.sleep(chance.random())
        address = (self.target.host, self.target.port, self.target.path)
        while not self.is_ending:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    session = await open_session(*address)
                self.begun += 1
                await self._steps(session, chance.randint(1, self.most_steps))
                session.end()
            except (OSError, TimeoutError) as exc:
                self.failures.append(repr(exc))
                await asyncio.sleep(1.0)

    async def _steps(self, session: LightSession, count: int) -> None:
        due = time.monotonic()
        for _ in range(count):
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            async with asyncio.timeout(ANSWER_SECONDS):
                self.latencies.append(await session.step(due))

    def taken(self) -> list[float]:
        """The latencies since this was asked last."""
        found, self.latencies = self.latencies, []
        return found


async def measure(environ: dict[str, str], replicas: int, options: Any, report: Report) -> int:
    """Two updates; how many sessions were dropped or refused."""
    words = ["launch", "benchmark", "--name", NAME, "--replicas", str(replicas)]
    words += ["--max-sessions", str(4 * options.sessions)]
    launched = await asyncio.to_thread(openenv, environ, *words)
    crowd = Crowd(Target(NAME, launched["environment"]["address"]), options.sessions, options.most)
    running = asyncio.create_task(crowd.run())
    await asyncio.sleep(options.steady)
    what = f"{options.sessions:,} sessions, {replicas} replica{'s' * (replicas > 1)}"

    def note_steps(when: str) -> None:
        steps = crowd.taken()
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
        await asyncio.sleep(options.steady)
    note_steps("after")
    crowd.is_ending = True
    await running
    report.append(f"{what}: begun", "", crowd.begun)
    report.append(f"{what}: dropped or refused (aim 0)", "", len(crowd.failures))
    for why in sorted(set(crowd.failures))[:3]:
        print(f"failed: {why}", flush=True)
    await asyncio.to_thread(openenv, environ, "down", NAME)
    return len(crowd.failures)


async def _until(environ: dict[str, str], number: int, state: str) -> None:
    """Wait for the state of a generation."""
    while True:
        found = await asyncio.to_thread(openenv, environ, "status", NAME)
        history = found["environments"][0]["generations"]
        if any(each["number"] == number and each["state"] == state for each in history):
            return
        await asyncio.sleep(LOOK_SECONDS)


def main() -> int:
    """What the arguments say."""
    options = parse_arguments(
        "Rolling updates under sessions.",
        3,
        short={"action": "store_true", "help": "100 sessions, 1 replica"},
        sessions={"type": int, "help": "how many step at once"},
    )
    options.sessions = options.sessions or (SHORT_SESSIONS if options.short else SESSIONS)
    options.most = SHORT_MOST_STEPS if options.short else MOST_STEPS
    options.steady = SHORT_STEADY_SECONDS if options.short else STEADY_SECONDS
    report, dropped = Report("Rolling updates under stepping sessions"), 0
    for replicas in REPLICAS[:1] if options.short else REPLICAS:
        for _ in range(options.repetitions):
            with daemon() as environ:
                dropped += asyncio.run(measure(environ, replicas, options, report))
    report.finish(options.json)
    return 1 if dropped else 0


if __name__ == "__main__":
    sys.exit(main())
