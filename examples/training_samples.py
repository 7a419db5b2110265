# SPDX-License-Identifier: Apache-2.0
"""Make training samples of a rollout's episodes: the model's prompts and completions.

python training_samples.py FOLDER

The policy has noted `prompt_ids`, `completion_ids` and, if wanted, `logprobs` with each step. Each
step has the whole prompt, and the completion. If a prompt begins with the whole sample so far, the
step continues the sample: the new part of the prompt is context (mask 0), the completion is
trained on (mask 1). Otherwise (the history was cut or rewritten) another sample begins.

    step 0   [prompt 0][completion 0]
    step 1   [prompt 0][completion 0][new of prompt 1][completion 1]
    mask      0 0 0 0   1 1 1 1 1 1   0 0 0 0 0 0 0    1 1 1 1 1

Arrays with a row per token (routed experts) may cover fewer than the step's tokens: engines have no
row for the last one. Each step contributes the rows that no earlier step had. Pieces are views that
are joined once at the end, in linear time; joining them at each step would take quadratic time.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openenvd.rollouts import open_rollouts
from openenvd.rollouts.episodes import Array, Step
from openenvd.rollouts.errors import StageError
from openenvd.rollouts.folder.rows import StepRow

TOKENS = "q"  # 64 bits, as in torch
_PIECE_BYTES = 1 << 20  # of one copy
INTEGERS = {"int32": "i", "<i4": "i", "int64": "q", "<i8": "q", "uint32": "I", "<u4": "I"}
REALS = {"float32": "f", "<f4": "f", "float64": "d", "<f8": "d"}


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One call of the model. `arrays` have a row per token, from the first one of the prompt."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] = ()  # of the completion; empty if unknown
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence. All but `advantage` have a row per token."""

    token_ids: array[int]  # 64 bits
    mask: bytes  # 1: trained on
    logprobs: array[float]  # 32 bits; 0 where masked
    arrays: Mapping[str, Array] = field(default_factory=dict)
    advantage: float | None = None


def tokens_of(step: Step | StepRow) -> TokenStep:
    """Return the model call that a policy recorded with a step.

    Args:
        step: A step with `prompt_ids`, `completion_ids` and, optionally, `logprobs`, as arrays or
            in its info. All other arrays must have a row per token.

    Raises `StageError`: the step has no ids.
    """
    arrays = dict(step.arrays)
    given = {name: arrays.pop(name, None) for name in ("prompt_ids", "completion_ids", "logprobs")}
    if given["prompt_ids"] is None or given["completion_ids"] is None:
        info = step.info
        for name in given:
            given[name] = given[name] if given[name] is not None else info.get(name)
    if given["prompt_ids"] is None or given["completion_ids"] is None:
        raise StageError("a step has no prompt_ids and completion_ids, in its arrays or its info")
    prompt = _numbers(given["prompt_ids"], "token ids", TOKENS, INTEGERS)
    completion = _numbers(given["completion_ids"], "token ids", TOKENS, INTEGERS)
    logprobs = _numbers(given["logprobs"], "logprobs", "f", REALS)
    return TokenStep(prompt, completion, logprobs, arrays)


def interleave(
    steps: Iterable[TokenStep], *, advantage: float | None = None
) -> list[TrainingSample]:
    """Join the steps of an episode to training samples; most episodes give one.

    Args:
        steps: The steps in order.
        advantage: The episode's advantage, which each sample gets.

    Raises `StageError`: an array does not fit its step, or changes its form between steps.
    """
    growing: list[_Growing] = []
    for step in steps:
        if not (growing and growing[-1].add(step)):
            growing.append(_Growing())
            growing[-1].add(step)
    return [sample.finished(advantage) for sample in growing]


class _Growing:
    """A sample until all of its steps are known."""

    def __init__(self) -> None:
        self._ids = array(TOKENS)
        self._mask = bytearray()
        self._logprobs = array("f")
        self._rows: dict[str, _Rows] = {}

    def add(self, step: TokenStep) -> bool:
        """Add a step; False, without adding it, if its prompt does not continue the sample."""
        before = len(self._ids)
        begins = step.prompt_ids[:before]  # a shorter prompt also differs
        if (begins if isinstance(begins, array) else array(TOKENS, begins)) != self._ids:
            return False
        context = len(step.prompt_ids) - before
        answers = len(step.completion_ids)
        if len(step.logprobs) not in (0, answers):
            raise StageError(f"{len(step.logprobs)} logprobs for {answers} tokens")
        self._ids.extend(array(TOKENS, step.prompt_ids[before:]))
        self._ids.extend(array(TOKENS, step.completion_ids))
        self._mask += bytes(context) + b"\x01" * answers
        self._logprobs.frombytes(bytes(4 * context))
        self._logprobs.extend(array("f", step.logprobs or [0.0] * answers))
        for name, rows in step.arrays.items():
            self._rows.setdefault(name, _Rows(name, rows)).add(rows, len(self._ids))
        return True

    def finished(self, advantage: float | None) -> TrainingSample:
        arrays = {name: rows.joined(len(self._ids)) for name, rows in self._rows.items()}
        return TrainingSample(self._ids, bytes(self._mask), self._logprobs, arrays, advantage)


class _Rows:
    """An array of a sample, in pieces."""

    def __init__(self, name: str, first: Array) -> None:
        self._name = name
        self._form = (first.dtype, first.shape[1:])
        self._row_bytes = first.size_bytes // first.shape[0] if first.shape[0] else 0
        self._pieces: list[memoryview] = []
        self._covered = 0  # tokens that have a row

    def add(self, rows: Array, tokens: int) -> None:
        """Add the rows that are new."""
        if (rows.dtype, rows.shape[1:]) != self._form:
            raise StageError(f"{self._name} changes its form: {rows.dtype} {rows.shape[1:]}")
        if rows.shape[0] > tokens:
            raise StageError(f"{self._name} has {rows.shape[0]} rows for {tokens} tokens")
        self._row_bytes = self._row_bytes or rows.size_bytes // max(1, rows.shape[0])
        if rows.shape[0] > self._covered:
            view = memoryview(rows.data).cast("B")
            self._pieces.append(view[self._covered * self._row_bytes :])
            self._covered = rows.shape[0]

    def joined(self, tokens: int) -> Array:
        """Return the whole array, copied once; tokens without a row have zeros.

        It copies a megabyte at a time: `join` would hold the GIL during the whole copy.
        """
        data, at = bytearray(tokens * self._row_bytes), 0
        for piece in self._pieces:
            for first in range(0, len(piece), _PIECE_BYTES):
                part = piece[first : first + _PIECE_BYTES]
                data[at : at + len(part)] = part
                at += len(part)
        dtype, shape = self._form
        return Array(data, dtype, (tokens, *shape))


def _numbers(value: Any, what: str, code: str, codes: Mapping[str, str]) -> Any:
    """Return an array of the type `code`, from a list or an `Array` of one of these types."""
    if not isinstance(value, Array):
        return array(code, () if value is None else value)
    if value.dtype not in codes:
        raise StageError(f"{what} of type {value.dtype}; known are {', '.join(codes)}")
    found = array(codes[value.dtype])
    found.frombytes(value.data)
    return found if found.typecode == code else array(code, found)


def training_samples(folder: str) -> Iterator[TrainingSample]:
    """Yield the samples of all episodes in a folder of rollouts."""
    for episode in open_rollouts(folder):
        steps = map(tokens_of, episode.steps())
        yield from interleave(steps, advantage=episode.row["advantage"])


if __name__ == "__main__":
    for found in training_samples(sys.argv[1]):
        print(f"{len(found.token_ids)} tokens, {sum(found.mask)} to be trained on")
