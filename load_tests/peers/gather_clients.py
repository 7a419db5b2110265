# SPDX-License-Identifier: Apache-2.0
"""Clients like those of training code: all sessions of a process in one `asyncio.gather`.

    python load_tests/peers/gather_clients.py     `GenericEnvClient` of OpenEnv's package

The program speaks the protocol of `openenvd.rollouts.bench.generator` (lines of JSON, see there),
so that a batch is measured in the same way.
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

Json = dict[str, Any]

UPSTREAM = "openenv"


async def upstream_session(url: str, batch: Json, ends: Callable[[str], None]) -> Json:
    client = import_module(UPSTREAM).GenericEnvClient(  # not in our Python
        base_url=url, connect_timeout_s=batch["handshake_seconds"]
    )
    await client.connect()
    ends("connect")
    try:
        await client.reset()
        ends("reset")
        result = await client.step(batch["action"])
        ends("step")
    finally:
        await client.close()
    observation: Json = result.observation
    return observation


class Gather:
    """One batch."""

    def __init__(self, batch: Json) -> None:
        self._batch = batch
        self._url = f"http://{batch['host']}:{batch['port']}{batch['path']}"

    async def run(self, started_at: float) -> Json:
        """Run all sessions from `started_at` on; returns what a generator reports."""
        await asyncio.sleep(started_at - time.monotonic())
        cpu = time.process_time()
        count = self._batch["count"]
        outcomes = await asyncio.gather(*(self._one(started_at) for _ in range(count)))
        return {
            "cpu_seconds": time.process_time() - cpu,
            "wall_seconds": time.monotonic() - started_at,
            "outcomes": outcomes,
        }

    async def _one(self, started_at: float) -> Json:
        outcome: Json = {
            "connect_seconds": None,
            "reset_seconds": None,
            "step_seconds": None,
            "observation": None,
            "error_kind": None,
            "error_message": None,
        }
        began = started_at

        def ends(phase: str) -> None:
            nonlocal began
            now = time.monotonic()
            outcome[f"{phase}_seconds"], began = now - began, now

        try:
            async with asyncio.timeout(self._batch["timeout_seconds"]):
                outcome["observation"] = await upstream_session(self._url, self._batch, ends)
        except Exception as exc:  # each error is a result
            cause = exc.__cause__ or exc
            late = isinstance(cause, TimeoutError) and outcome["connect_seconds"] is None
            outcome["error_kind"] = "handshake_timeout" if late else type(cause).__name__
            outcome["error_message"] = str(exc)[:300]
        outcome["total_seconds"] = time.monotonic() - started_at
        return outcome


def say(message: Json) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Run batch after batch until the crew closes stdin."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import_module(UPSTREAM).GenericEnvClient  # noqa: B018  # seconds, before anything is timed
    with asyncio.Runner() as runner:
        gather: Gather | None = None
        for line in sys.stdin:
            message = json.loads(line)
            if "batch" in message:
                gather = Gather(message["batch"])
                say({"prepared": True})
            elif gather is not None and "go" in message:
                say({"done": runner.run(gather.run(message["go"]))})


if __name__ == "__main__":
    main()
