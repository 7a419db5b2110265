# SPDX-License-Identifier: Apache-2.0
"""What has no fixed form is in columns what it was in the lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from openenvd.rollouts.episodes import Step
from openenvd.rollouts.folder.output import Output

from .made import episode


def observations(folder: Path, *texts: bytes) -> list[str]:
    """The column, of an episode whose steps saw these."""
    output = Output(folder, form="parquet")
    for number, text in enumerate(texts):
        output.put_step("a", number, Step(text, b"1", 0.5, False))
    output.finish(episode("a"))
    output.close()
    table = parquet.read_table(folder / "steps-00000.parquet")
    assert table.column("reward").to_pylist() == [0.5] * len(texts)
    found: list[str] = table.column("observation").to_pylist()
    return found


def test_texts_are_written_unchanged(tmp_path: Path) -> None:
    """Also numbers of more digits than a machine word has."""
    texts = [b'{"n": 12345678901234567890123, "x": 1.10}', b'"\xc3\xa9"', b"null"]
    assert observations(tmp_path, *texts) == [text.decode() for text in texts]


def test_nan_and_infinities_are_preserved(tmp_path: Path) -> None:
    [text] = observations(tmp_path, b'[NaN, Infinity, -Infinity, "\\ud83d"]')
    nan, most, least, half = json.loads(text)
    assert (math.isnan(nan), most, least, half) == (True, math.inf, -math.inf, "\ud83d")
