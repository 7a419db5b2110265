# SPDX-License-Identifier: Apache-2.0
"""Training samples as a batch for `senders`, and back: numbers travel as they are, not as text."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from ..episodes import Array, BytesLike
from ..sending.frames import Batch
from .interleave import TOKENS, TrainingSample


def batch_of(samples: Sequence[TrainingSample]) -> Batch:
    """Nothing is copied: the batch's buffers are the samples' memory."""
    heads: list[dict[str, Any]] = []
    buffers: list[BytesLike] = []
    for sample in samples:
        arrays = [[name, a.dtype, list(a.shape)] for name, a in sample.arrays.items()]
        heads.append({"advantage": sample.advantage, "arrays": arrays})
        buffers += [memoryview(sample.token_ids), sample.mask, memoryview(sample.logprobs)]
        buffers += [a.data for a in sample.arrays.values()]
    return Batch({"samples": heads}, buffers)


def samples_of(batch: Batch) -> list[TrainingSample]:
    """What `batch_of` was given. Large arrays stay on the batch's memory."""
    buffers = iter(batch.buffers)
    return [_sample(head, buffers) for head in batch.content["samples"]]


def _sample(head: dict[str, Any], buffers: Iterator[BytesLike]) -> TrainingSample:
    token_ids, logprobs = array(TOKENS), array("f")
    token_ids.frombytes(next(buffers))
    mask = bytes(next(buffers))
    logprobs.frombytes(next(buffers))
    arrays = {
        name: Array(next(buffers), dtype, tuple(shape)) for name, dtype, shape in head["arrays"]
    }
    return TrainingSample(token_ids, mask, logprobs, arrays, head["advantage"])
