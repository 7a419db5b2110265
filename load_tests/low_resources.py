# SPDX-License-Identifier: Apache-2.0
"""SkyPilot's tests of low resources and of the common case, in a real cgroup of that size.

    (a)  how many `launch --async` of `echo` are up at once before the first kill, with `status`
         and `logs` still answering
    (b)  requests that each hold 150 MB while they run: how many at once; the others wait
    (c)  a hundred `launch --async` at once: the API answers meanwhile, and all end
    (d)  whether it starts, and SHORT requests at once: 1, 2, 4, 8, … until one is killed or lost

The sizes are 0.5 CPU with 750 MB, and 4 CPUs with 16 GB. Everything runs through the installed
command inside the group: daemon, workers, environments and the commands themselves; (b) alone runs
the queue, the dispatcher and the executor by themselves (`memory_holders.py`).

Peers, each in a fresh group of the same size: of (b) and (d) SkyPilot's way on the standard
library; of (d) the real one too, with `--peer skypilot` (skypilot_peer.py). It launches nothing
without a cloud: of (a) there is only what was measured elsewhere, 3 and 30, at 210 to 250 MB each.

Aim: ten times both, four or more of (b), no kill.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

from load_tests.peers.pool_peer import POOL
from load_tests.peers.scaling_servers import REPOSITORY
from load_tests.peers.skypilot_peer import PEER_OPTION, Kind, kinds
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import Report, parse_arguments, percentile
from load_tests.shared.tight_group import SIZES, Group, Size, why_no_group
from load_tests.short_in_tight_group import Key, short_of_ours, short_of_peer

HOLDERS = 8
HELD_MB = 150
HUNDRED = 100
LAUNCH_SECONDS = 60.0
STEP = {"small": 30, "large": 100}
MOST = {"small": 90, "large": 400}
OURS = "openenvd"

HELD_AT_ONCE = (f"(b) requests holding {HELD_MB} MB at once (aim: 4)", "")
HOLDERS_SUCCEEDED = (f"(b) succeeded, of {HOLDERS}", "")


def main() -> int:
    """Each part on each size, in a fresh group and with a fresh daemon."""
    options = parse_arguments(
        "Low resources.",
        repetitions=1,
        sizes={"nargs": "+", "choices": list(SIZES), "default": list(SIZES)},
        parts={"nargs": "+", "choices": list(PARTS), "default": list(PARTS)},
        most={"type": int, "default": 0, "help": "environments to try in (a); 0: by size"},
        step={"type": int, "default": 0, "help": "so many more at a time in (a); 0: by size"},
        peer=PEER_OPTION,
    )
    if why_not := why_no_group():
        print(f"skipped: {why_not}")
        return 0
    report = Report("Low resources")
    found: dict[Key, dict[str, list[float]]] = {}
    with kinds(options.peer) as peers:
        for _ in range(options.repetitions):
            for size, part in product(options.sizes, options.parts):
                for who, measured in _everyone(size, part, options, peers):
                    for (name, unit), value in measured.items():
                        key = (f"{SIZES[size].name}: {name}", unit)
                        found.setdefault(key, {}).setdefault(who, []).append(value)
    for (name, unit), by_whom in found.items():
        report.beside(name, unit, by_whom.pop(OURS), by_whom)
    report.finish(options.json)
    return 0


def _everyone(
    size_name: str, part: str, options: Namespace, peers: list[Kind]
) -> Iterator[tuple[str, dict[Key, float]]]:
    yield OURS, _inside(size_name, part, options)
    if part == "b":
        yield POOL, _holders_of_pool(SIZES[size_name])
    if part == "d":
        for kind in peers:
            yield kind.name, short_of_peer(kind, SIZES[size_name])


@contextmanager
def _daemon(size: Size) -> Iterator[tuple[Group, dict[str, str]]]:
    group = Group(size)
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as home:
        environ = {**os.environ, "OPENENV_HOME": home, "OPENENV_PORT": "0"}
        started = group.run(["up"], environ)
        if started.returncode != 0:
            group.remove()
            raise SystemExit(f"no daemon in {size.name}: {started.stderr}")
        try:
            yield group, environ
        finally:
            for words in (["down", "--all"], ["stop"]):
                with suppress(subprocess.TimeoutExpired):
                    group.run(words, environ)
            group.remove()


def _kills(part: str) -> Key:
    return f"({part}) kernel kills (aim: 0)", ""


def _peak(part: str) -> Key:
    return f"({part}) memory at the peak, page cache included", "MB"


def _inside(size_name: str, part: str, options: Namespace) -> dict[Key, float]:
    most, step = options.most or MOST[size_name], options.step or STEP[size_name]
    with _daemon(SIZES[size_name]) as (group, environ):
        found = PARTS[part](group, environ, most, step)
        return {
            **found,
            _kills(part): group.kills(),
            _peak(part): group.peak_mb(),
        }


# (a)


def _launches(group: Group, environ: dict[str, str], most: int, step: int) -> dict[Key, float]:
    """More and more, a step at once, until one does not come up or the kernel kills."""
    up = 0
    answers: list[float] = []
    while up < most:
        names = [f"echo-{number}" for number in range(up, min(most, up + step))]
        for name in names:
            group.run(["launch", "--async", "echo", "--name", name], environ)
        states = asyncio.run(_states_of_launches(environ["OPENENV_HOME"], names))
        answers += [_timed(group, ["status"], environ), _timed(group, ["logs", "echo-0"], environ)]
        up += states["SUCCEEDED"]
        if states["SUCCEEDED"] < len(names) or group.kills():
            break
    return {
        (f"(a) environments up at once (tried {most})", ""): up,
        ("(a) `status` and `logs` among them, slowest", "s"): max(answers),
    }


async def _states_of_launches(home: str, names: list[str]) -> Counter[str]:
    client = ApiClient(home)
    states: Counter[str] = Counter()
    deadline = time.monotonic() + LAUNCH_SECONDS
    for name in names:
        path = f"/v1/requests?operation=launch&environment={name}"
        [request] = (await client.call("GET", path))["requests"]
        while not request["finished_at"] and time.monotonic() < deadline:
            path = f"/v1/requests/{request['id']}?wait_seconds=5"
            request = (await client.call("GET", path))["request"]
        states[request["state"]] += 1
    await client.close()
    return states


def _timed(group: Group, words: list[str], environ: dict[str, str]) -> float:
    began = time.perf_counter()
    answered = group.run(words, environ)
    assert answered.returncode == 0, answered.stderr
    return time.perf_counter() - began


# (b)


def _holders(group: Group, environ: dict[str, str], _most: int, _step: int) -> dict[Key, float]:
    """Run requests that hold memory, in the group and under its plan.

    No operation of the product holds memory on demand, so `memory_holders` runs the queue, the
    dispatcher and the executor with an operation that does.
    """
    group.run(["stop"], environ)
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as folder:
        words = ["-m", "load_tests.shared.memory_holders", folder, str(HOLDERS), str(HELD_MB)]
        done = group.run_program([sys.executable, *words], environ)
    if done.returncode != 0:
        raise SystemExit(f"the holders could not run: {done.stderr}")
    told = json.loads(done.stdout)
    return {
        HELD_AT_ONCE: told["at_once"],
        ("(b) waiting meanwhile, at most", ""): told["waiting"],
        HOLDERS_SUCCEEDED: told["succeeded"],
    }


def _holders_of_pool(size: Size) -> dict[Key, float]:
    """The same by a `ProcessPoolExecutor` with a worker for each, as SkyPilot's bursts are."""
    group = Group(size)
    words = ["-m", "load_tests.peers.pool_peer", str(HOLDERS), str(HELD_MB)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    try:
        done = group.run_program([sys.executable, *words], environ)
        # It may have been killed itself.
        told = json.loads(done.stdout or "{}")
        return {
            HELD_AT_ONCE: told.get("at_once", 0),
            HOLDERS_SUCCEEDED: told.get("succeeded", 0),
            _kills("b"): group.kills(),
            _peak("b"): group.peak_mb(),
        }
    finally:
        group.remove()


# (c)


def _hundred(group: Group, environ: dict[str, str], _most: int, _step: int) -> dict[Key, float]:
    return asyncio.run(_all_at_once(environ["OPENENV_HOME"]))


async def _all_at_once(home: str) -> dict[Key, float]:
    """Each environment is taken down as soon as it is up, as a user who tries a hundred would."""
    client = ApiClient(home)
    began = time.monotonic()
    ids = [
        await client.submit("launch", {"source": "echo", "name": f"echo-{number}"})
        for number in range(HUNDRED)
    ]
    ending = asyncio.gather(*(_launched_and_down(home, request_id) for request_id in ids))
    waits = []
    while not ending.done():
        asked = time.perf_counter()
        await client.call("GET", "/v1/status")
        waits.append(time.perf_counter() - asked)
        await asyncio.wait([ending], timeout=0.1)
    states = Counter(await ending)
    await client.close()
    return {
        ("(c) a hundred at once: succeeded", ""): states["SUCCEEDED"],
        ("(c) ended otherwise", ""): HUNDRED - states["SUCCEEDED"],
        ("(c) until all had ended", "s"): time.monotonic() - began,
        ("(c) `status` meanwhile, p99", "s"): percentile(waits, 0.99),
    }


async def _launched_and_down(home: str, request_id: str) -> str:
    client = ApiClient(home)
    request = await client.wait(request_id)
    if request["state"] == "SUCCEEDED":
        await client.run("down", {"name": request["environment"]})
    await client.close()
    return str(request["state"])


# (d)


def _short(group: Group, environ: dict[str, str], _most: int, _step: int) -> dict[Key, float]:
    """`_daemon` has started it, or has ended this program."""
    began = time.monotonic()
    for words in (["stop"], ["up"]):
        began = time.monotonic()
        done = group.run(words, environ)
        assert done.returncode == 0, done.stderr
    return short_of_ours(group, environ["OPENENV_HOME"], time.monotonic() - began)


PARTS: dict[str, Any] = {"a": _launches, "b": _holders, "c": _hundred, "d": _short}


if __name__ == "__main__":
    sys.exit(main())
