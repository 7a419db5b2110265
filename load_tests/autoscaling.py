# SPDX-License-Identifier: Apache-2.0
"""An environment that scales itself under a stepped load, from 1 and back: what its clients notice.

    python -m load_tests.autoscaling                1 to 8 replicas of 8 slots
    python -m load_tests.autoscaling --short        1 to 2 replicas

Behind the gateway. So many sessions are wanted, for so long; each steps all the time. A step's
sessions come one after another, in a few seconds. One that finds no slot waits for it, as long as
the environment lets it (`admission-timeout`); then it is refused, and its
client tries again after a while. When fewer are wanted, some of them, chosen at random, end. Twice
a second the daemon is asked how many replicas there are.

Aims: no session ends that its client did not end, and none is refused; all replicas that may be are
there at the top, and one at the end. For how long the last of a step waited says what the scaling
costs.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from load_tests.peers.scaling_servers import openenv
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import Report, daemon, parse_arguments

LOADS, SHORT_LOADS = (0, 4, 12, 24, 42, 60, 32, 16, 4, 0), (0, 4, 12, 0)
REPLICAS, SHORT_REPLICAS = 8, 2
SLOTS = 8  # of each replica
HOLD_SECONDS, SHORT_HOLD_SECONDS = 12.0, 4.0
DOWN_SECONDS, SHORT_DOWN_SECONDS = 5.0, 1.0
ARRIVAL_SECONDS = 0.15  # between two sessions that begin
SAMPLE_SECONDS = 0.5
STEP_SECONDS = 0.1
RETRY_SECONDS = 0.5
OPEN_SECONDS = 60.0
ADMISSION_SECONDS = 20.0
SETTLE_SECONDS = 60.0  # for the replicas that are drained at the end
SEED = 14


@dataclass
class Figures:
    """What was seen of the environment."""

    most: int = 0  # replicas that were ready at once
    replicas: int = 0  # that are there now, also those that drain
    refused: int = 0
    lost: list[str] = field(default_factory=list)  # how sessions ended that were not to end
    filled: list[float] = field(default_factory=list)  # of each step: until all were there


class Crowd:
    """As many sessions as are wanted."""

    def __init__(self, address: str, figures: Figures) -> None:
        self._url = f"{address.replace('http', 'ws')}/ws"
        self._figures = figures
        self._clients: dict[asyncio.Task[None], asyncio.Event] = {}
        self._random = random.Random(SEED)
        self.wanted = 0
        self.open = 0

    def want(self, count: int) -> None:
        """Begin more sessions, or let some end."""
        for number in range(count - self.wanted):
            is_over = asyncio.Event()
            client = self._client(is_over, number * ARRIVAL_SECONDS)
            self._clients[asyncio.create_task(client)] = is_over
        for task in self._random.sample(list(self._clients), max(0, self.wanted - count)):
            self._clients.pop(task).set()
        self.wanted = count

    async def _client(self, is_over: asyncio.Event, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        while not is_over.is_set():
            try:
                async with connect(self._url, open_timeout=OPEN_SECONDS) as connection:
                    await connection.send('{"type": "reset"}')
                    if json.loads(await connection.recv())["type"] == "observation":
                        await self._hold(connection, is_over)
                        return
            except (OSError, InvalidHandshake, ConnectionClosed):
                pass  # as the refusal that was read: tried again
            self._figures.refused += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _hold(self, connection: Any, is_over: asyncio.Event) -> None:
        self.open += 1
        try:
            while not is_over.is_set():
                await connection.send('{"type": "step", "data": {"message": "hello"}}')
                answer = json.loads(await connection.recv())
                if answer["type"] != "observation":
                    self._figures.lost.append(str(answer))
                    return
                await asyncio.sleep(STEP_SECONDS)
        except ConnectionClosed as exc:
            self._figures.lost.append(str(exc))
        finally:
            self.open -= 1


async def sample(api: ApiClient, figures: Figures) -> None:
    """Look how many replicas there are, until cancelled."""
    while True:
        environment = (await api.call("GET", "/v1/environments/echo"))["environment"]
        states = Counter(replica["state"] for replica in environment["replicas"])
        figures.most = max(figures.most, states["READY"])
        figures.replicas = states["READY"] + states["DRAINING"]
        await asyncio.sleep(SAMPLE_SECONDS)


async def play(address: str, home: str, loads: tuple[int, ...], seconds: float) -> Figures:
    """All steps of the load, one after the other; then until one replica is left."""
    figures = Figures()
    crowd, api = Crowd(address, figures), ApiClient(home)
    sampling = asyncio.create_task(sample(api, figures))
    for count in loads:
        began = time.monotonic()
        crowd.want(count)
        while crowd.open < count:
            await asyncio.sleep(0.01)
        figures.filled.append(time.monotonic() - began)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    deadline = time.monotonic() + SETTLE_SECONDS
    while figures.replicas > 1 and time.monotonic() < deadline:
        await asyncio.sleep(SAMPLE_SECONDS)
    sampling.cancel()
    await asyncio.wait({sampling})
    await api.close()
    return figures


def main() -> int:
    """Play the load; 1 when a session was lost or refused, or replicas were missing or left."""
    flag = {"action": "store_true", "help": "seconds instead of minutes"}
    options = parse_arguments(__doc__ or "", 1, short=flag)
    most = SHORT_REPLICAS if options.short else REPLICAS
    down = SHORT_DOWN_SECONDS if options.short else DOWN_SECONDS
    words = ["launch", "echo", "--gateway", "--shards", "1", "--max", str(most)]
    words += ["--max-sessions", str(SLOTS * most), "--set", f"scale-down={down}"]
    words += ["--set", f"admission-timeout={ADMISSION_SECONDS}"]
    report = Report("An environment that scales itself under a stepped load")
    runs = []
    for _ in range(options.repetitions):
        with daemon() as environ:
            address = openenv(environ, *words)["environment"]["address"]
            loads = SHORT_LOADS if options.short else LOADS
            hold = SHORT_HOLD_SECONDS if options.short else HOLD_SECONDS
            runs.append(asyncio.run(play(address, environ["OPENENV_HOME"], loads, hold)))
    report.add("replicas at the most", "", [run.most for run in runs])
    report.add("replicas at the end", "", [run.replicas for run in runs])
    report.add("sessions lost (aim 0)", "", [len(run.lost) for run in runs])
    report.add("clients refused (aim 0)", "", [run.refused for run in runs])
    report.add("until all sessions of a step were there", "s", [max(run.filled) for run in runs])
    for text in {text for run in runs for text in run.lost}:
        report.note(f"lost: {text}")
    report.finish(options.json)
    is_met = all(not run.lost and run.most == most and run.replicas == 1 for run in runs)
    # Whether a client is refused in a run of seconds is a matter of what else the machine does.
    is_met &= options.short or not any(run.refused for run in runs)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
