# SPDX-License-Identifier: Apache-2.0
"""Rollouts at full size beside the naive way, with a slow disk, and the cost of folders.

    python -m load_tests.rollouts [--short] [--parts sizes slow folder] [--sizes 1000 …]
        [--datasets PYTHON]    a Python that has Hugging Face's `datasets`

Each way runs in a process of its own (`rollout_ways.py`), against one `openenv launch benchmark`.
Memory is the process's peak less its memory after its imports. `failures/rollout_crashes.py` kills
rollouts in the middle.

The naive way keeps everything in memory, more than twice. Where that exceeds half of the free
memory, the way first runs until it reaches its limit, and is then measured with as many episodes as
fit: compare steps a second. An idle loop (the way `idle`) runs beside each way: its lag, which the
machine causes, is the limit. When that lag exceeds half of our aim, our way is run again, and the
report shows both runs.

A virtual machine returns the pages of a large run, ten gigabytes, to its host, and is slow
meanwhile, so nothing is measured for `SETTLE_SECONDS`. Even later, allocating those pages is
expensive: in the run after the naive one, our loop was late five times as often. So our runs come
first.

The cost of a folder, by its number of episodes: writing, closing, resuming, opening for reading,
reading all totals, and `datasets.load_dataset` over it. A killed rollout leaves as many files as
one that has ended, and those of its last half second: resuming is measured after `close`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from load_tests.peers.rollout_ways import GROUP, Task, Told
from load_tests.peers.scaling_servers import openenv
from load_tests.shared.report import Report, daemon, parse_arguments
from openenvd.rollouts.episodes import Episode, EpisodeStatus, Step
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.writer import RolloutWriter
from openenvd.system.text.units import MB

PARTS = ("sizes", "slow", "folder")
SIZES = (1_000, 100_000, 1_000_000)
NAIVE_COPIES = 3.0  # of the payloads: parsed, joined, and on the way to the file
AIM_P99_SECONDS, AIM_MAX_SECONDS, AIM_MEMORY = 0.010, 0.100, 1.2
SLOW_SIZE = 100_000
SETTLE_SECONDS, LARGE_RUN_BYTES = 15.0, 1 << 30
DISTURBED_SECONDS = AIM_P99_SECONDS / 2  # p99 lag of the idle loop
IDLE = "idle loop beside it, p99 and max ms"
NOTHING = Task(0, 0, 0, 0, 0, 0)
FOLDER_STEPS, WRITERS = 5, 64
LOAD = """
import json, sys, time
from datasets import Features, Json, Value, load_dataset

kinds = {"kind": "string", "episode_id": "string"}
kinds |= {"step": "int64", "reward": "float64", "done": "bool"}
fields = {name: Value(kind) for name, kind in kinds.items()}
fields |= dict.fromkeys(("observation", "action", "info", "arrays", "episode"), Json())
given = {"features": Features(fields), "split": "train", "cache_dir": sys.argv[2]}
began = time.monotonic()
rows = load_dataset("json", data_files=sys.argv[1], **given)
seconds = time.monotonic() - began
print(json.dumps([seconds, sum(reward is not None for reward in rows["reward"])]))
"""


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    episodes: int
    steps: int
    buffer_mb: int  # half for running episodes, half for waiting writes
    slow_seconds: float  # with the slow disk, the run takes about twice this
    most_disturbed: int  # runs in a row; the next one counts anyway
    in_folder: tuple[int, ...]  # episodes


FULL = Scale(256, 50, 1024, 30.0, 2, (10, 1_000, 100_000))
SHORT = Scale(64, 10, 384, 2.5, 0, (10, 1_000))


@dataclass
class Bench:
    """The state that all parts share."""

    report: Report
    scale: Scale
    folder: Path
    repetitions: int
    wrong: list[str]
    sizes: Sequence[int]

    def task(self, payload_bytes: int) -> Task:
        """Return the task of all episodes at once."""
        scale, half = self.scale, self.scale.buffer_mb * MB // 2
        return Task(scale.episodes, scale.steps, scale.episodes, payload_bytes, half, half)

    def run(self, way: str, address: str, task: Task) -> Told:
        """Run one way, in a process and a folder of its own."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            command = way_command(way, address, folder, task)
            with idle_loop(folder) as idle:
                done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{way} ended with {done.returncode}")
        told = Told(**json.loads(done.stdout))
        told.notes[IDLE] = idle
        self._check(way, task, told)
        if told.peak_bytes > LARGE_RUN_BYTES:
            time.sleep(SETTLE_SECONDS)
        return told

    def undisturbed(self, address: str, task: Task) -> Told:
        """Run our way; run it again if the machine delayed the idle loop."""
        for _ in range(self.scale.most_disturbed):
            told = self.run("ours", address, task)
            idle_p99_ms, _max_ms = told.notes[IDLE]
            if idle_p99_ms <= DISTURBED_SECONDS * 1e3:
                return told
            self.report.note(
                f"{_size_name(task.payload_bytes)}: a run was DISTURBED, and made again: lag p99 "
                f"{told.lag_p99_seconds * 1e3:.1f} ms, max {told.lag_max_seconds * 1e3:.1f} ms; "
                f"of the {IDLE}: {told.notes[IDLE]}"
            )
        return self.run("ours", address, task)

    def expect(self, fact: bool, otherwise: str) -> None:
        """Record a fault unless the fact holds."""
        if not fact:
            self.wrong.append(otherwise)

    def _check(self, way: str, task: Task, told: Told) -> None:
        if told.out_of_memory:
            return
        wanted = (task.episodes, task.episodes * task.steps)
        found = (told.episodes, told.steps)
        self.expect(found == wanted, f"{way}: {found} episodes and steps instead of {wanted}")
        least = task.episodes * task.steps * task.payload_bytes
        self.expect(told.joined_bytes >= least, f"{way}: {told.joined_bytes} bytes were joined")


@contextmanager
def idle_loop(folder: str) -> Iterator[list[float]]:
    """Run an idle loop in a process of its own, whose lag is caused by the machine.

    The yielded list has the p99 and the greatest lag, in ms, after the block.
    """
    found: list[float] = []
    pipe = subprocess.PIPE
    with subprocess.Popen(
        way_command("idle", "", folder, NOTHING), stdin=pipe, stdout=pipe
    ) as process:
        try:
            yield found
        finally:
            told = Told(**json.loads(process.communicate()[0]))
            lags = (told.lag_p99_seconds, told.lag_max_seconds)
            found += [round(seconds * 1e3, 2) for seconds in lags]


def way_command(way: str, address: str, folder: str, task: Task) -> list[str]:
    words = [way, address, f"{folder}/out", json.dumps(asdict(task))]
    return [sys.executable, "-m", "load_tests.peers.rollout_ways", *words]


def sizes(bench: Bench, address: str) -> None:
    """Part 1: run our way, and then the naive way, with every payload size."""
    for payload_bytes in bench.sizes:
        task = bench.task(payload_bytes)
        ours = [bench.undisturbed(address, task) for _ in range(bench.repetitions)]
        naive_task = _naive_task(bench, address, task)
        naive = [bench.run("naive", address, naive_task) for _ in range(bench.repetitions)]
        title = _size_name(payload_bytes)
        mine = _add(bench.report, f"{title}, ours", ours)
        theirs = _add(bench.report, f"{title}, naive", naive)
        pairs = [a / b for a, b in zip(mine, theirs, strict=True)]
        bench.report.add(f"{title}, ours / naive: steps a second", "x", pairs)
        _aims(bench, title, task, ours)


def _naive_task(bench: Bench, address: str, task: Task) -> Task:
    """Return a task of as many episodes as fit; first show how far the whole task comes."""
    room = psutil.virtual_memory().available // 2
    each = task.steps * task.payload_bytes * NAIVE_COPIES
    if each * task.episodes <= room:
        return replace(task, most_bytes=room)
    told = bench.run("naive", address, replace(task, most_bytes=room))
    name = _size_name(task.payload_bytes)
    if told.out_of_memory:
        bench.report.note(f"{name}: the naive way was ended at {told.peak_bytes / MB:,.0f} MB.")
    episodes = max(GROUP, int(room / each) // GROUP * GROUP)
    bench.report.note(f"{name}: the naive way is measured with {episodes} episodes.")
    return replace(task, episodes=episodes, most_bytes=1 << 62)


def _add(report: Report, name: str, told: Sequence[Told]) -> list[float]:
    """Add the lines of one way; returns its steps a second."""
    rates = [one.steps / one.seconds for one in told]
    report.add(f"{name}: wall", "s", [one.seconds for one in told])
    report.add(f"{name}: steps a second", "1/s", rates)
    report.add(f"{name}: loop lag p50", "ms", [one.lag_p50_seconds * 1e3 for one in told])
    report.add(f"{name}: loop lag p99", "ms", [one.lag_p99_seconds * 1e3 for one in told])
    report.add(f"{name}: loop lag max", "ms", [one.lag_max_seconds * 1e3 for one in told])
    report.add(f"{name}: peak memory", "MB", [_grown(one) / MB for one in told])
    report.add(f"{name}: the loop waited for a core", "s", [one.starved_seconds for one in told])
    return rates


def _aims(bench: Bench, title: str, task: Task, ours: Sequence[Told]) -> None:
    """Check the aims; a miss is noted, with how long the loop waited for a core."""
    configured = task.running_bytes + task.buffer_bytes
    for one in ours:
        memory = _grown(one) / configured
        held = {
            "lag p99": one.lag_p99_seconds <= AIM_P99_SECONDS,
            "lag max": one.lag_max_seconds <= AIM_MAX_SECONDS,
            "memory": memory <= AIM_MEMORY,
        }
        missed = ", ".join(name for name, holds in held.items() if not holds)
        bench.report.note(
            f"{title}: aims {'MISSED: ' + missed if missed else 'met'}; "
            f"memory {memory:.2f} of what is configured, {one.notes}"
        )


def slow(bench: Bench, address: str) -> None:
    """Part 2: run our way with a disk that is too slow."""
    fast = bench.task(SLOW_SIZE)
    total = fast.episodes * fast.steps * SLOW_SIZE
    speed = int(total / bench.scale.slow_seconds)
    task = replace(
        fast, buffer_bytes=total // 4, running_bytes=total // 4, disk_bytes_per_second=speed
    )
    told = [bench.run("ours", address, task) for _ in range(bench.repetitions)]
    name = f"disk of {speed / MB:.0f} MB/s, {_size_name(SLOW_SIZE)}"
    _add(bench.report, name, told)
    for one in told:
        memory = _grown(one) / (task.buffer_bytes + task.running_bytes)
        bench.report.note(
            f"{name}: aim {'met' if memory <= AIM_MEMORY else 'MISSED'}: "
            f"{one.episodes} of {task.episodes} episodes written, memory {memory:.2f} of "
            f"what is configured ({(task.buffer_bytes + task.running_bytes) / MB:.0f} MB) "
            f"for {total / MB:.0f} MB of payload."
        )


async def write(folder: str, episodes: int) -> dict[str, float]:
    """Write episodes of a few hundred bytes a step, with several writers at once."""
    writer = await RolloutWriter.open(folder)

    async def slot() -> None:
        for number in numbers:
            name = f"{number:06}"
            for at in range(FOLDER_STEPS):
                seen = {"text": "x" * 200, "at": at, "worth": None if number % 2 else at}
                await writer.put_step(
                    name, at, Step.of(seen, {"move": at}, 1.0, at == FOLDER_STEPS - 1)
                )
            await writer.finish(Episode(name, "e", 1, (), 5.0, EpisodeStatus.DONE, 1.0, 2.0))

    began = time.monotonic()
    numbers = iter(range(episodes))
    await asyncio.gather(*(slot() for _ in range(WRITERS)))
    written = time.monotonic()
    await writer.close()
    return {"write": written - began, "close": time.monotonic() - written}


async def resume(folder: str, episodes: int) -> dict[str, float]:
    """Time resuming: until the existing episodes are known."""
    began = time.monotonic()
    writer = await RolloutWriter.open(folder)
    found = len(writer.finished_episode_ids())
    seconds = time.monotonic() - began
    await writer.close()
    if found != episodes:
        raise SystemExit(f"{found} of {episodes} episodes exist")
    return {"resume": seconds}


def read(folder: str, episodes: int) -> dict[str, float]:
    """Time reading: until the folder is open, and until all totals are read."""
    began = time.monotonic()
    rollouts = open_rollouts(folder)
    opened = time.monotonic()
    _check_steps(sum(episode.row["steps"] for episode in rollouts), episodes)
    return {"open": opened - began, "totals": time.monotonic() - opened}


def load(python: str, folder: str, root: str, episodes: int) -> dict[str, float]:
    """Time `load_dataset` of all steps, in a Python that may lack our package."""
    command = [python, "-c", LOAD, f"{folder}/**/*.jsonl", f"{root}/cache"]
    environ = {**os.environ, "HF_HOME": f"{root}/home", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, cwd="/", check=True, stdout=subprocess.PIPE)
    seconds, steps = json.loads(done.stdout.splitlines()[-1])
    _check_steps(steps, episodes)
    return {"load": seconds}


def _check_steps(found: int, episodes: int) -> None:
    if found != FOLDER_STEPS * episodes:
        raise SystemExit(f"{found} of {FOLDER_STEPS * episodes} steps are read")


def folders(bench: Bench, datasets: str | None) -> None:
    """Part 3: measure the cost of a folder."""
    sizes = [size for size in bench.scale.in_folder for _ in range(bench.repetitions)]
    for episodes in sizes:
        with tempfile.TemporaryDirectory(dir=bench.folder) as root:
            out = f"{root}/out"
            told = asyncio.run(write(out, episodes)) | asyncio.run(resume(out, episodes))
            told |= read(out, episodes)
            told |= {} if datasets is None else load(datasets, out, root, episodes)
            told["files"] = len(list(Path(out).glob("**/*.jsonl")))
        for name, value in told.items():
            unit = "" if name == "files" else "s"
            bench.report.append(f"{episodes:,} episodes: {name}", unit, value)


def _grown(told: Told) -> int:
    return told.peak_bytes - told.base_bytes


def _size_name(payload_bytes: int) -> str:
    return (
        f"{payload_bytes // 1000} kB" if payload_bytes < 10**6 else f"{payload_bytes // 10**6} MB"
    )


def main() -> int:
    options = _options()
    scale = SHORT if options.short else FULL
    scale = replace(scale, steps=options.steps or scale.steps)
    report = Report("Rollouts")
    with (
        tempfile.TemporaryDirectory(prefix="openenvd-rollouts-", dir=options.folder) as folder,
        daemon() as environ,
    ):
        words = ["launch", "benchmark", "--max-sessions", str(4 * scale.episodes)]
        address = openenv(environ, *words)["environment"]["address"]
        bench = Bench(report, scale, Path(folder), options.repetitions, [], options.sizes)
        if "sizes" in options.parts:
            sizes(bench, address)
        if "slow" in options.parts:
            slow(bench, address)
        if "folder" in options.parts:
            folders(bench, options.datasets)
    for line in bench.wrong:
        report.note(f"WRONG  {line}")
    report.finish(options.json)
    return 1 if bench.wrong else 0


def _options() -> argparse.Namespace:
    return parse_arguments(
        "Rollouts.",
        repetitions=1,
        short={"action": "store_true", "help": "fewer episodes and steps"},
        parts={"nargs": "+", "choices": PARTS, "default": list(PARTS)},
        steps={"type": int, "help": "of each episode"},
        sizes={"nargs": "+", "type": int, "default": list(SIZES), "help": "bytes of a step"},
        datasets={"help": "a Python with Hugging Face's datasets"},
        folder={"help": "where to write; the speed of its disk affects the figures"},
    )


if __name__ == "__main__":
    sys.exit(main())
