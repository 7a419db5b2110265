# SPDX-License-Identifier: Apache-2.0
"""SkyPilot's tests of low resources and of the common case, in a real cgroup of that size.

    (a)  how many `launch --async` of `echo` are up at once before the first kill, while `status`
         and `logs` still answer
    (b)  whether the daemon starts, and still answers after some time without work

The sizes are 0.5 CPU with 750 MB, and 4 CPUs with 16 GB. Everything runs through the installed
command inside the group: daemon, workers, environments and the commands themselves.

With `--peer skypilot`, the peer of (b) is SkyPilot, in a fresh group of the same size. It launches
nothing without a cloud, so (a) is compared with figures from elsewhere: 3 and 30, at 210 to
250 MB each.

Aim: ten times both figures, without a kill.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from load_tests.peers.skypilot_peer import PEER_OPTION, SKYPILOT, answers, skypilot, started
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import OPENENV, Report, parse_arguments
from openenvd.system.memory.cgroup_tree import V1
from openenvd.system.memory.cgroups import Cgroup
from openenvd.system.text.units import MB

LAUNCH_SECONDS = 60.0
STEP = {"small": 30, "large": 100}
MOST = {"small": 90, "large": 400}
OURS = "openenvd"
START_SECONDS = 180.0
ANSWER_SECONDS = 10.0
PEER_IDLE_SECONDS = 60.0  # with half a CPU, its workers import for so long
PERIOD_US = 100_000
HIERARCHY = Path("/sys/fs/cgroup")

Key = tuple[str, str]  # name, unit


@dataclass(frozen=True)
class Size:
    """The size of a machine."""

    name: str
    cpus: float
    memory_bytes: int


SIZES = {
    "small": Size("0.5 CPU, 750 MB", 0.5, 750 * MB),
    "large": Size("4 CPU, 16 GB", 4.0, 16 * 1024 * MB),
}


def why_no_group() -> str | None:
    """Return why no group with limits can be made (it takes cgroup v1 and root), or None."""
    for controller in ("memory", "cpu"):
        folder = HIERARCHY / controller
        if not os.access(folder / "cgroup.procs", os.W_OK):
            return f"{folder} is no writable cgroup v1 hierarchy"
    return None


class Group:
    """A real cgroup with both limits; its processes are inside from their first instruction."""

    def __init__(self, size: Size) -> None:
        name = f"openenvd-load-{os.getpid()}-{time.monotonic_ns()}"
        self._memory = HIERARCHY / "memory" / name
        self._cpu = HIERARCHY / "cpu" / name
        for folder in (self._memory, self._cpu):
            folder.mkdir()
        (self._memory / "memory.limit_in_bytes").write_text(str(size.memory_bytes))
        (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (self._cpu / "cpu.cfs_quota_us").write_text(str(int(size.cpus * PERIOD_US)))

    def run(self, words: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside([OPENENV, *words]),
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def inside(self, words: list[str]) -> list[str]:
        """Return a command that enters the group, and then executes `words`."""
        files = [str(folder / "cgroup.procs") for folder in (self._memory, self._cpu)]
        enter = "".join(f'echo $$ > "{file}"; ' for file in files)
        return ["/bin/sh", "-c", f'{enter} exec "$@"', "sh", *words]

    def kills(self) -> int:
        """Count the kernel's kills for memory, in the group and in all groups below it."""
        files = self._memory.rglob("memory.oom_control")
        return sum(Cgroup(str(file.parent), file.parent.name, V1).oom_kills() for file in files)

    def peak_mb(self) -> float:
        return int((self._memory / "memory.max_usage_in_bytes").read_text()) / 1e6

    def remove(self) -> None:
        for folder in (self._memory, self._cpu):
            below = sorted(folder.rglob("cgroup.procs"), key=lambda p: -len(p.parts))
            for file in below:
                Cgroup(str(file.parent), file.parent.name, V1).kill()
                with suppress(OSError):
                    file.parent.rmdir()


def main() -> int:
    """Run each part on each size, in a fresh group and with a fresh daemon."""
    options = parse_arguments(
        "Low resources.",
        repetitions=1,
        sizes={"nargs": "+", "choices": list(SIZES), "default": list(SIZES)},
        parts={"nargs": "+", "choices": list(PARTS), "default": list(PARTS)},
        most={"type": int, "default": 0, "help": "environments to try in (a); 0: by size"},
        peer=PEER_OPTION,
    )
    if why_not := why_no_group():
        print(f"skipped: {why_not}")
        return 0
    report = Report("Low resources")
    found: dict[Key, dict[str, list[float]]] = {}
    with skypilot(options.peer) as peer:
        for _ in range(options.repetitions):
            for size, part in product(options.sizes, options.parts):
                for who, measured in _everyone(size, part, options, peer):
                    for (name, unit), value in measured.items():
                        key = (f"{SIZES[size].name}: {name}", unit)
                        found.setdefault(key, {}).setdefault(who, []).append(value)
    for (name, unit), by_whom in found.items():
        report.beside(name, unit, by_whom.pop(OURS), by_whom)
    report.finish(options.json)
    return 0


def _everyone(
    size_name: str, part: str, options: Namespace, peer: list[str] | None
) -> Iterator[tuple[str, dict[Key, float]]]:
    yield OURS, _inside(size_name, part, options)
    if part == "b" and peer is not None:
        yield SKYPILOT, _short_of_peer(peer, SIZES[size_name])


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
    most = options.most or MOST[size_name]
    with _daemon(SIZES[size_name]) as (group, environ):
        found = PARTS[part](group, environ, most, STEP[size_name])
        return {
            **found,
            _kills(part): group.kills(),
            _peak(part): group.peak_mb(),
        }


# (a)


def _launches(group: Group, environ: dict[str, str], most: int, step: int) -> dict[Key, float]:
    """Launch one batch after another until an environment does not start or the kernel kills."""
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


def _short(group: Group, environ: dict[str, str], _most: int, _step: int) -> dict[Key, float]:
    """Restart the daemon that `_daemon` has started, and time that."""
    began = time.monotonic()
    for words in (["stop"], ["up"]):
        began = time.monotonic()
        done = group.run(words, environ)
        assert done.returncode == 0, done.stderr
    seconds = time.monotonic() - began
    return _started(True, seconds, asyncio.run(_says_status(environ["OPENENV_HOME"])))


def _started(is_healthy: bool, seconds: float, answers: bool) -> dict[Key, float]:
    return {
        ("(b) starts (aim: 1)", ""): is_healthy,
        ("(b) start to healthy", "s"): seconds,
        ("(b) answers afterwards (aim: 1)", ""): answers,
    }


async def _says_status(home: str) -> bool:
    client = ApiClient(home)
    try:
        return bool(await client.call("GET", "/v1/status"))
    except (OSError, EOFError, RuntimeError):
        return False
    finally:
        await client.close()


def _short_of_peer(command: list[str], size: Size) -> dict[Key, float]:
    group = Group(size)
    try:
        with started(command, group.inside, START_SECONDS) as peer:
            time.sleep(PEER_IDLE_SECONDS if peer.is_healthy else 0.0)
            return {
                **_started(peer.is_healthy, peer.seconds, answers(peer.port, ANSWER_SECONDS)),
                _kills("b"): group.kills(),
                _peak("b"): group.peak_mb(),
            }
    finally:
        group.remove()


PARTS: dict[str, Any] = {"a": _launches, "b": _short}


if __name__ == "__main__":
    sys.exit(main())
