# SPDX-License-Identifier: Apache-2.0
"""Folders of rollouts are datasets of Hugging Face's own library, from the package index.

It has a virtual environment of its own (400 MB), kept between runs as upstream's is. What is
written here is what its guessing of types falls over: observations of many forms, columns that are
null at first, arrays that come late, rows larger than what it reads at a time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, Failure, FailureReason, Step
from openenvd.rollouts.folder.layout import FORMATS, JSONL, PARQUET, Verdict
from openenvd.rollouts.folder.output import Output

from .conftest import REPOSITORY, Machine, install, make_venv, smoke_cache
from .pages import name_of, pages_that_need, run_blocks

pytestmark = pytest.mark.timeout(400)  # whichever is first installs what it needs

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
    """A Python that has `datasets`, and ours as it is now."""
    with smoke_cache() as cache:
        folder = cache / DATASETS_REQUIREMENT.replace("==", "-")
        if not (folder / "complete").exists():
            make_venv(folder, DATASETS_REQUIREMENT)
            (folder / "complete").touch()
        install(folder, f"{REPOSITORY}[arrow]")
    return folder / "bin" / "python"


def steps(episode: int) -> Iterator[Step]:
    """Early episodes have no rewards, no info and no arrays; the last has all of them."""
    for number, observation in enumerate(OBSERVATIONS[: 3 * (episode + 1)]):
        if episode == 0:
            yield Step.of(observation, number, None, False)
            continue
        image = Array(bytes([number]) * 77, "uint8", (7, 11))
        arrays = {"image": image} if number % 2 else {}
        info = {f"key{number}": observation} if episode == 2 else {}
        yield Step.of(observation, {"move": [number]}, float(number), number == 8, info, arrays)


def finished(name: str, seed: int | None, seen: bytes) -> Episode:
    """An episode whose steps are there already."""
    done = EpisodeStatus.DONE
    return Episode(name, "ws://env", seed, (), 1.0, done, 1.5, 2.5, final_observation_json=seen)


def write(folder: Path, form: str, episodes: range = range(3)) -> Path:
    """Each episode is a part of its own; the last is followed by one that failed."""
    output = Output(folder, form=form, part_bytes=10)
    for number in episodes:
        for at, step in enumerate(steps(number)):
            output.put_step(str(number), at, step)
        output.finish(finished(str(number), number or None, b'{"n":%d}' % number))
    failure = Failure(FailureReason.ENVIRONMENT_ERROR, "it raised", 0)
    name = f"failed-{episodes.start}"
    failed = Episode(name, "ws://env", None, (), 0.0, EpisodeStatus.FAILED, 1.0, 2.0, failure)
    output.finish(failed, Verdict(advantage=-0.5, filtered="failed"))
    output.close()
    return folder


def load(python: Path, *folders: Path) -> str:
    """Has them compared, without a network."""
    home = {"HF_HOME": str(folders[0].parent / "hugging"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), str(REPOSITORY / "smoke_tests" / "load_datasets.py"), *map(str, folders)],
        env={**os.environ, **home},
        cwd=folders[0].parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


def test_datasets_reads_the_rows_that_we_read(python: Path, tmp_path: Path) -> None:
    told = load(python, *(write(tmp_path / form, form) for form in FORMATS))
    assert told.splitlines() == [f"{f}: 4 episodes and 18 steps are the same" for f in FORMATS]


def test_a_folder_of_two_formats_is_one_dataset(python: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "mixed", JSONL, range(1))
    write(folder, PARQUET, range(1, 2))
    assert load(python, folder) == "mixed: 4 episodes and 9 steps are the same\n"


def test_an_empty_rollout_is_an_empty_dataset(python: Path, tmp_path: Path) -> None:
    Output(tmp_path / "none").close()
    assert load(python, tmp_path / "none") == "none: 0 episodes and 0 steps are the same\n"


@pytest.mark.parametrize("page", pages_that_need("datasets"), ids=name_of)
def test_the_blocks_of_a_page_that_need_datasets_run(
    machine: Machine, python: Path, page: Path
) -> None:
    machine.command = str(python.with_name("openenv"))
    run_blocks(machine, page, "datasets")
