# SPDX-License-Identifier: Apache-2.0
"""An episode's file, and its lines, written and read.

    {"kind": "step", "episode_id": "000042", "step": 0, "observation": …, "action": …, "info": …,
     "reward": 1.0, "done": false, "arrays": [{"name": …, "dtype": …, "shape": …, "data": base64}]}
    …
    {"kind": "last", "episode_id": "000042", "step": 12, "observation": …}
    {"kind": "end", "episode_id": "000042", "step": 12, "episode": {"status": "done", …,
     "last_bytes": 80, "sha256": "…"}}

`sha256` covers all bytes of the episode before `,"sha256"`. The last line of a pack ends with the
pack's index, in the field `index`. When a line is read, only the fields that are used are parsed.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson

from ..episodes import Array, BytesLike, Episode, Step, parse
from ..errors import OutputDamaged
from .disk import Disk, Stamp, stamp_of

JOIN_BYTES = 32 << 10  # a smaller step is encoded immediately, as one bytes object
LARGE_BYTES = 4 << 20  # the file of a larger episode is dropped from the page cache
_LIKELY_BYTES = 512 << 10  # a write of this size is followed by others
STEP, LAST, END = "step", "last", "end"
_NO_BREAKS = bytes.maketrans(b"\r\n", b"  ")
_ENCODED_BYTES = 3 << 15  # a multiple of 3; encoding holds the interpreter lock
_SUM = b',"sha256":"'
END_START = b'{"kind":"end"'
END_OF_LINE = b"}}\n"  # of an episode's last line
END_OF_LAST = b"}\n"  # of the line with the last observation
_TOTALS = (  # of an episode, in its last line
    *("environment", "seed", "status", "total_reward", "parent", "branched_at"),
    *("attempts", "started_at", "finished_at"),
)
Row = list[BytesLike]
_skim = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Verdict:
    """The stages' result for an episode."""

    advantage: float | None = None
    filtered: str | None = None  # the filter that dropped it, with its steps


class EpisodeFile:
    """The lines of one attempt at an episode: their beginning on disk, their end in memory.

    The event loop adds lines; one thread at a time writes them. The methods that add lines return
    how many bytes more are held in memory.
    """

    def __init__(self, episode_id: str, path: Path) -> None:
        self.episode_id = episode_id
        self.path = path
        self.steps = 0
        self.first_step = 0  # its number; above 0 for a branch, whose parent has those before
        self.fault: str | None = None  # the reason why it cannot be finished
        self.size_bytes = 0  # on disk
        self.is_touched = False  # whether the file on disk was changed by anything but this object
        self._stamp: Stamp | None = None  # of what is on disk
        self.pending_bytes = 0  # in memory
        self._pending: list[Row | Callable[[], Row]] = []  # large rows are made when written
        self._last_bytes = 0  # of the line with the last observation
        self._digest = hashlib.sha256()

    def add(self, number: int, step: Step) -> int:
        """Add the next step; a step out of order makes the episode unusable."""
        if not self.steps:
            self.first_step = number
        if number != self.first_step + self.steps and self.fault is None:
            self.fault = f"step {number} came after {self.steps} steps"
        self.steps += 1
        size_bytes = step.size_bytes
        if size_bytes < JOIN_BYTES:
            row = b"".join(step_row(self.episode_id, number, step))
            return self._append([row], len(row))
        return self._append(partial(step_row, self.episode_id, number, step), size_bytes)

    def add_last(self, observation_json: bytes) -> int:
        """Add the observation after the last step; its text precedes `END_OF_LAST`."""
        head = orjson.dumps({"kind": LAST, "episode_id": self.episode_id, "step": self._next_step})
        row: Row = [head[:-1] + b',"observation":', one_line(observation_json), END_OF_LAST]
        self._last_bytes = sum(map(len, row))
        return self._append(row, self._last_bytes)

    def add_end(self, episode: Episode, verdict: Verdict) -> int:
        """Add the last lines of an episode."""
        held_bytes = 0
        if not self._last_bytes and verdict.filtered is None:
            held_bytes = self.add_last(episode.final_observation_json)
        end = end_row(episode, self._next_step, self._last_bytes, verdict)

        def with_checksum() -> Row:
            self._digest.update(end)
            return [end, _SUM, self._digest.hexdigest().encode(), b'"' + END_OF_LINE]

        return held_bytes + self._append(with_checksum, len(end))

    @property
    def _next_step(self) -> int:
        return self.first_step + self.steps

    def write(self, disk: Disk, *, write_back: bool = False) -> None:
        """Append the lines in memory to the file. Blocks."""
        chunks = self._take()
        size_bytes = sum(len(memoryview(chunk).cast("B")) for chunk in chunks)
        is_large = self.size_bytes + size_bytes >= LARGE_BYTES or size_bytes >= _LIKELY_BYTES
        self.is_touched |= self._stamp is not None and stamp_of(self.path) != self._stamp
        disk.append(self.path, chunks, write_back=write_back or is_large)
        self._stamp = stamp_of(self.path)
        self.size_bytes += size_bytes

    def content(self) -> bytes:
        """Return all lines of the episode; call this only while none of them is on disk."""
        return b"".join(self._take())

    def _append(self, row: Row | Callable[[], Row], size_bytes: int) -> int:
        """Keep a row in memory, and return how many bytes more are held there."""
        self._pending.append(row)
        self.pending_bytes += size_bytes
        return size_bytes

    def _take(self) -> Row:
        rows, self._pending, self.pending_bytes = self._pending, [], 0
        chunks: Row = []
        for row in rows:  # in order: the last line has the digest of those before it
            made = row() if callable(row) else row
            for chunk in made:
                self._digest.update(chunk)
            chunks += made
        return chunks


def step_row(episode_id: str, number: int, step: Step) -> Row:
    """Return the line of a step in chunks, so that large texts are not copied."""
    head = orjson.dumps({"kind": STEP, "episode_id": episode_id, "step": number})
    tail = orjson.dumps({"reward": step.reward, "done": step.done})
    row: Row = [head[:-1] + b',"observation":', one_line(step.observation_json)]
    row += [b',"action":', one_line(step.action_json), b',"info":', one_line(step.info_json)]
    row.append(b"," + tail[1:-1] + b',"arrays":[')
    for at, (name, array) in enumerate(step.arrays.items()):
        entry = orjson.dumps({"name": name, "dtype": array.dtype, "shape": array.shape})
        row += [b"," if at else b"", entry[:-1] + b',"data":"']
        view = memoryview(array.data).cast("B")
        for begin in range(0, len(view), _ENCODED_BYTES):
            row.append(binascii.b2a_base64(view[begin : begin + _ENCODED_BYTES], newline=False))
        row.append(b'"}')
    row.append(b"]}\n")
    return row


def end_row(episode: Episode, steps: int, last_bytes: int, verdict: Verdict) -> bytes:
    """Return the line of an episode's totals up to its checksum."""
    failure = episode.failure
    totals = {
        **{name: getattr(episode, name) for name in _TOTALS},
        "steps": steps,
        "failure_reason": failure.reason if failure else None,
        "failure_message": failure.message if failure else None,
        "failure_step": failure.step if failure else None,
        **asdict(verdict),
        "last_bytes": last_bytes,
    }
    row = {"kind": END, "episode_id": episode.id, "step": steps, "episode": totals}
    return orjson.dumps(row)[:-2]


def before_checksum(line: bytes) -> bytes:
    """Return the part of an episode's last line that its checksum covers."""
    return line[: line.rfind(_SUM)]


def without_index(lines: bytes) -> bytes:
    """Return the lines of an episode, or only its last one, without the index of a pack."""
    end = lines.rfind(_SUM) + len(_SUM) + 2 * hashlib.sha256().digest_size + 1
    return lines[:end] + END_OF_LINE


def parsed_end(line: bytes, path: object) -> dict[str, Any]:
    """Parse an episode's last line: its id as `episode_id`, its totals, checksum and index.

    Raises `OutputDamaged`: `line` is not the last line of an episode.
    """
    try:
        row = msgspec.json.decode(line)
        if row["kind"] == END and "sha256" in row["episode"]:
            return {"episode_id": row["episode_id"], **row["episode"]}
    except (ValueError, KeyError, TypeError):
        pass
    raise OutputDamaged(f"{path} has been cut or changed: an episode's last line is missing")


class StepRow:
    """One step, as it was written. Each field is parsed at its first use, and kept.

    A row references only its own line, so keeping one does not keep other rows in memory.
    """

    __slots__ = ("_fields", "_line")

    def __init__(self, line: bytes) -> None:
        self._line = line
        self._fields: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"StepRow(number={self.number}, reward={self.reward}, done={self.done})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StepRow, (self._line,)

    def __getitem__(self, name: str) -> Any:
        if self._fields is None:
            try:
                self._fields = _skim(self._line)
            except msgspec.DecodeError:  # only the standard library can read its values
                self._fields = _parsed(self._line)
        value = self._fields[name]
        if isinstance(value, msgspec.Raw):
            value = self._fields[name] = _parsed(memoryview(value))
        return value

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return int(self["step"])

    @property
    def observation(self) -> Any:
        """The observation that the policy saw."""
        return self["observation"]

    @property
    def action(self) -> Any:
        """The action of the policy."""
        return self["action"]

    @property
    def reward(self) -> float | None:
        """The reward of the action."""
        return cast("float | None", self["reward"])

    @property
    def done(self) -> bool:
        """Return whether the environment ended the episode with this step."""
        return bool(self["done"])

    @property
    def info(self) -> Mapping[str, Any]:
        """The policy's info and the environment's `metadata`."""
        return cast("Mapping[str, Any]", self["info"])

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the step; decoded each time."""
        return {
            item["name"]: Array(
                binascii.a2b_base64(item["data"]), item["dtype"], tuple(item["shape"])
            )
            for item in self["arrays"]
        }


def _parsed(text: BytesLike) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as exc:
        hint = "`Rollouts.verify` says which file has changed since it was written"
        raise OutputDamaged(f"a row is not JSON: {exc}", hint) from exc


def one_line(text: bytes) -> bytes:
    """Replace line breaks by blanks; in a JSON text they only occur between tokens."""
    return text.translate(_NO_BREAKS) if b"\n" in text or b"\r" in text else text
