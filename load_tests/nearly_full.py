# SPDX-License-Identifier: Apache-2.0
"""Sessions at an environment behind the gateway where 2 % of the slots are free: is one refused?

    python -m load_tests.nearly_full [--replicas 8 32 100 200] [--sessions 1000] [--json FILE]

All slots of an environment but 2 % are taken. Then as many clients as there are free slots end a
session at random and begin another, so that the free slots move between the replicas. "Replicas
asked" counts the replicas that Envoy sent one handshake to, by its own counter of retries.

Aim: no session is refused.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.light_clients import LightSession, open_session
from load_tests.shared.report import Report, daemon, parse_arguments, percentile
from openenvd.environments.gateway import process
from openenvd.environments.gateway.envoy import ask_admin
from openenvd.rollouts.bench.results import Target
from openenvd.schema.layout import Layout

NAME = "full"
SLOTS, FREE_PERCENT = 10, 2  # of each replica; of all slots
HOLDERS_AT_ONCE = 16
PACE_SECONDS = 0.1  # between two sessions of one client, on average
OPEN_SECONDS = 60.0
SETTLE_SECONDS = 3.0  # until Envoy knows which replicas are full
SEED = 29
MS = 1e3


class Crowd:
    """Clients whose sessions come and go, so that the free slots move between replicas."""

    def __init__(self, target: Target, admin: Path) -> None:
        self.begun: list[float] = []  # the seconds that each session took to begin
        self.refused: Counter[str] = Counter()
        self.retries = 0
        self._address = (target.host, target.port, target.path)
        self._admin = admin
        self._held: list[LightSession] = []
        self._chance = random.Random(SEED)

    async def play(self, held: int, clients: int, sessions: int) -> None:
        """Open `held` sessions; then end one at random and begin the next, `sessions` times."""
        turns = asyncio.Semaphore(HOLDERS_AT_ONCE)

        async def hold() -> None:
            async with turns:
                self._held.append(await open_session(*self._address))

        await asyncio.gather(*(hold() for _ in range(held)))
        await asyncio.sleep(SETTLE_SECONDS)
        before = await asyncio.to_thread(retries, self._admin)
        left = iter(range(sessions))
        await asyncio.gather(*(self._come_and_go(left) for _ in range(clients)))
        self.retries = await asyncio.to_thread(retries, self._admin) - before

    async def _come_and_go(self, left: Iterator[int]) -> None:
        for _ in left:
            leaving = self._held.pop(self._chance.randrange(len(self._held)))
            leaving.end()
            await leaving.ended
            began = time.perf_counter()
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    self._held.append(await open_session(*self._address))
                self.begun.append(time.perf_counter() - began)
            except (OSError, TimeoutError) as exc:
                self.refused[repr(exc)] += 1
            await asyncio.sleep(self._chance.random() * 2 * PACE_SECONDS)


def retries(admin: Path) -> int:
    """Return how often Envoy has sent a handshake again."""
    answer = ask_admin(admin, f"/stats?format=json&filter=cluster.{NAME}.upstream_rq_retry$")
    return sum(each.get("value", 0) for each in answer["stats"])


def measure(report: Report, replicas: int, sessions: int) -> bool:
    """Measure sessions that find the last free slots; return whether none was refused."""
    slots = SLOTS * replicas
    free = max(1, slots * FREE_PERCENT // 100)
    with daemon() as environ:
        words = ["--shards", "1", "--replicas", str(replicas), "--max-sessions", str(slots)]
        launched = openenv(environ, "launch", "benchmark", "--name", NAME, "--gateway", *words)
        gateway = process.read_gateway(Layout(Path(environ["OPENENV_HOME"])))
        assert gateway is not None
        target = Target(NAME, launched["environment"]["address"])
        crowd = Crowd(target, gateway.admin_socket)
        asyncio.run(crowd.play(slots - free, free, sessions))
    what = f"{replicas} replicas, {free} of {slots} slots free"
    report.append(f"{what}: refused, of {sessions} sessions", "", crowd.refused.total())
    report.append(f"{what}: replicas asked, on average", "", 1 + crowd.retries / sessions)
    for share in (0.5, 0.99):
        value = percentile(crowd.begun, share) if crowd.begun else float("nan")
        report.append(f"{what}: a session begins after, P{100 * share:.0f}", "ms", MS * value)
    for why, count in crowd.refused.most_common(3):
        report.note(f"{what}: {count} times {why}")
    return not crowd.refused


def main() -> int:
    options = parse_arguments(
        "Sessions at an environment that is nearly full.",
        1,
        replicas={"type": int, "nargs": "+", "default": [8, 32, 100, 200]},
        sessions={"type": int, "default": 1_000, "help": "that come and go"},
    )
    report = Report("Sessions at an environment that is nearly full")
    turns = [each for each in options.replicas for _ in range(options.repetitions)]
    have_room = [measure(report, replicas, options.sessions) for replicas in turns]
    report.finish(options.json)
    return 0 if all(have_room) else 1


if __name__ == "__main__":
    sys.exit(main())
