# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own library, from the package index, loads folders of rollouts.

It has a virtual environment of its own (400 MB), kept between runs like upstream's. The episodes
contain what confuses its inference of types: observations of many forms, values that are null at
first, arrays that come late, rows larger than the block that it reads at a time.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, Failure, FailureReason, Step
from openenvd.rollouts.folder.rows import Verdict
from openenvd.rollouts.folder.writer import RolloutWriter

from ..conftest import REPOSITORY, Machine, install, output_of, python_with, smoke_cache
from ..pages import name_of, pages_that_need, run_blocks

# The test that runs first installs the package.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

DATASETS_REQUIREMENT = "datasets==5.2.0"
LARGE = "é\n" * (2 << 20)  # 6 MB of a row; `datasets` reads 10 MB at a time
OBSERVATIONS = [
    {"text": "hello", "worth": None},
    {"text": None, "worth": 1},
    "a text, which is no object",
    [1, [2.5, {"deep": []}], None],
    {"other": {"form": 'ünïcode "quoted" \\ \u2028'}, "worth": 1.5},
    None,
    12345678901234567890,
    {"text": LARGE},
    {"text": LARGE, "worth": True},
]


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python that has `datasets`, and our package in its present state."""
    found = python_with(DATASETS_REQUIREMENT)
    with smoke_cache():
        install(found.parents[1], str(REPOSITORY))
    return found


def steps(episode: int) -> Iterator[Step]:
    """Make an episode's steps: early ones have no rewards, info or arrays; the last one has all."""
    for number, observation in enumerate(OBSERVATIONS[: 3 * (episode + 1)]):
        if episode == 0:
            yield Step.of(observation, number, None, False)
            continue
        image = Array(bytes([number]) * 77, "uint8", (7, 11))
        arrays = {"image": image} if number % 2 else {}
        info = {f"key{number}": observation} if episode == 2 else {}
        yield Step.of(observation, {"move": [number]}, float(number), number == 8, info, arrays)


async def write(folder: Path, episodes: int) -> None:
    """Write the episodes: the last one, which is large, is followed by a failed one."""
    async with await RolloutWriter.open(folder) as writer:
        for number in range(episodes):
            for at, step in enumerate(steps(number)):
                await writer.put_step(str(number), at, step)
            seed, seen = number or None, b'{"n":%d}' % number
            done = EpisodeStatus.DONE
            made = Episode(str(number), "ws://env", seed, (), 1.0, done, 1.5, 2.5, None, seen)
            await writer.finish(made)
        if episodes:
            failure = Failure(FailureReason.ENVIRONMENT_ERROR, "it raised", 0)
            failed = EpisodeStatus.FAILED
            made = Episode("failed", "ws://env", None, (), 0.0, failed, 1.0, 2.0, failure)
            await writer.finish_together([(made, Verdict(advantage=-0.5, filtered="failed"))])


def load(python: Path, folder: Path) -> str:
    home = {"HF_HOME": str(folder.parent / "hugging"), "HF_HUB_OFFLINE": "1"}
    program = REPOSITORY / "smoke_tests" / "rollouts" / "load_datasets.py"
    environ = {**os.environ, **home}
    return output_of(python, program, folder, env=environ, cwd=folder.parent, timeout=300)


def test_datasets_reads_the_rows_that_we_read(python: Path, tmp_path: Path) -> None:
    asyncio.run(write(tmp_path / "out", 3))
    assert load(python, tmp_path / "out") == "out: 4 episodes and 18 steps are the same\n"


@pytest.mark.parametrize("page", pages_that_need("datasets"), ids=name_of)
def test_the_blocks_of_a_page_that_need_datasets_run(
    machine: Machine, python: Path, page: Path
) -> None:
    machine.command = str(python.with_name("openenv"))
    run_blocks(machine, page, "datasets")
