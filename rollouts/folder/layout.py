# SPDX-License-Identifier: Apache-2.0
"""The layout of a folder of rollouts: file names, and the rows of the files.

    manifest.jsonl             a line per part: its files with sizes and checksums, its episodes
    steps-00000.jsonl          a row per step, episode after episode (or .parquet, .arrow)
    episodes-00000.jsonl       a row per episode: its totals, and where its steps and arrays lie
    arrays-00000.bin           the raw bytes of large arrays, each aligned for mapping
    *.partial                  a part that is being written: not there yet, for any reader
    spool/                     steps of unfinished episodes

A step's row says where in its episode's block an array lies; the episode's row says where the block
lies in the file, so that steps need not be written again when an episode finds its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from ..episodes import Array, BytesLike, Episode, Step

SCHEMA = "openenvd.rollouts/2"
MANIFEST, LOCK, SPOOL = "manifest.jsonl", ".lock", "spool"
PARTIAL = ".partial"
STEPS, EPISODES, ARRAYS = "steps", "episodes", "arrays"
KINDS = (STEPS, EPISODES, ARRAYS)
JSONL, PARQUET, ARROW = "jsonl", "parquet", "arrow"
FORMATS = (JSONL, PARQUET, ARROW)
ALIGNMENT_BYTES = 64  # what numpy and Arrow like best

_OURS = re.compile(r"(steps|episodes|arrays)-\d{5,}\.(jsonl|parquet|arrow|bin)(\.partial)?")
_ROW = orjson.OPT_APPEND_NEWLINE
_PIECE_BYTES = 32 << 10


class PartFile(msgspec.Struct, frozen=True, rename={"size_bytes": "bytes"}):
    """A file that is finished."""

    name: str
    size_bytes: int
    sha256: str


class Part(msgspec.Struct, frozen=True, rename={"number": "part"}):
    """Some episodes, in files that never change again; as the manifest records them."""

    number: int
    files: tuple[PartFile, ...]
    episode_ids: tuple[str, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The stages' result for an episode."""

    advantage: float | None = None
    filtered: str | None = None  # by which filter it was dropped; its steps are not kept then


@dataclass(frozen=True, slots=True)
class Block:
    """Where an episode lies in its part."""

    part: int
    first_row: int  # of its steps, among the rows of the part
    steps: int
    steps_offset: int  # in a JSONL file
    steps_bytes: int
    arrays_offset: int
    arrays_bytes: int


def file_name(kind: str, number: int, form: str = JSONL) -> str:
    """`steps-00003.jsonl`."""
    return f"{kind}-{number:05}.{'bin' if kind == ARRAYS else form}"


def is_ours(name: str) -> bool:
    """Whether a file is one of a part's; whatever else lies in the folder is left alone."""
    return _OURS.fullmatch(name) is not None


def partial(path: Path) -> Path:
    """The name of a file until it is finished."""
    return path.with_name(path.name + PARTIAL)


def padding(offset: int) -> int:
    """How many bytes until the next array may begin."""
    return -offset % ALIGNMENT_BYTES


def step_row(
    episode_id: str, number: int, step: Step, arrays: list[dict[str, Any]]
) -> list[BytesLike]:
    """A line of `steps-*.jsonl`, to be written one after the other: the texts are not copied."""
    head = orjson.dumps({"episode_id": episode_id, "step": number})
    tail = {"reward": step.reward, "done": step.done, "arrays": arrays}
    return [
        head[:-1] + b',"observation":',
        one_line(step.observation_json),
        b',"action":',
        one_line(step.action_json),
        b',"info":',
        one_line(step.info_json),
        b"," + orjson.dumps(tail, option=_ROW)[1:],
    ]


def array_row(name: str, array: Array, offset: int) -> dict[str, Any]:
    """An array as a step's row describes it; `offset` is into the episode's block."""
    return {
        "name": name,
        "dtype": array.dtype,
        "shape": list(array.shape),
        "offset": offset,
        "bytes": array.size_bytes,
    }


def episode_row(episode: Episode, block: Block, verdict: Verdict) -> list[BytesLike]:
    """A line of `episodes-*.jsonl`."""
    failure = episode.failure
    row = {
        "episode_id": episode.id,
        "environment": episode.environment,
        "seed": episode.seed,
        "status": episode.status.value,
        "total_reward": episode.total_reward,
        "attempts": episode.attempts,
        "started_at": episode.started_at,
        "finished_at": episode.finished_at,
        "failure_reason": failure.reason.value if failure else None,
        "failure_message": failure.message if failure else None,
        "failure_step": failure.step if failure else None,
        **asdict(block),
        **asdict(verdict),
    }
    text = one_line(episode.final_observation_json)
    return [orjson.dumps(row)[:-1] + b',"final_observation":', text, b"}\n"]


def one_line(text: BytesLike) -> BytesLike:
    """A JSON text without line breaks: they can only lie between its words."""
    if not any(b"\n" in piece or b"\r" in piece for piece in _pieces(text)):
        return text
    return bytes(text).replace(b"\r", b" ").replace(b"\n", b" ")


def _pieces(text: BytesLike) -> Iterator[bytes | bytearray]:
    """To be searched: in a view, Python compares byte by byte."""
    if not isinstance(text, memoryview):
        yield text
        return
    for at in range(0, len(text), _PIECE_BYTES):
        yield bytes(text[at : at + _PIECE_BYTES])
