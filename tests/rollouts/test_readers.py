# SPDX-License-Identifier: Apache-2.0
"""What was written is read back: rows, arrays on mapped memory, columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest

from openenvd.rollouts.episodes import Array
from openenvd.rollouts.layout import FORMATS, JSONL
from openenvd.rollouts.output import OWN_PART_BYTES, Output
from openenvd.rollouts.readers import open_rollouts

from .made import episode, finish, image, names, step


def write(folder: Path, form: str = JSONL) -> None:
    """Three episodes, with arrays of several kinds; the last is large."""
    output = Output(folder, form=form)
    for which, name in enumerate("abc"):
        for number in range(3):
            experts = np.arange(24, dtype="<i2").reshape(2, 3, 4) + number + 10 * which
            arrays = {
                "image": image(number, 77),
                "experts": Array(experts.tobytes(), "<i2", experts.shape),
            }
            text = "x" * (OWN_PART_BYTES // 3 if name == "c" else 10)
            output.put_step(name, number, step(number, text, arrays, note=name))
        output.finish(episode(name, final_observation_json=b'{"end":true}'))
    output.close()


@pytest.mark.parametrize("form", FORMATS)
def test_all_of_it_comes_back(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert (sorted(rollouts.episode_ids()), rollouts.steps) == (["a", "b", "c"], 9)
    for which, name in enumerate("abc"):
        found = rollouts.episode(name)
        assert found.row["final_observation"] == {"end": True}
        for number, row in enumerate(found.steps()):
            assert (row.number, row.reward, row.action) == (number, float(number), {"move": number})
            assert (row.observation["number"], row.info) == (number, {"note": name})
            experts = row.arrays["experts"].numpy()
            assert (experts.shape, experts.dtype) == ((2, 3, 4), np.dtype("<i2"))
            assert experts[0, 0, 0] == number + 10 * which
            assert set(row.arrays["image"].numpy()) == {number}


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    """Two readings of one array are the same memory, aligned as vector instructions like it."""
    write(tmp_path)
    rollouts = open_rollouts(tmp_path)
    addresses = {
        row.arrays["experts"].numpy().__array_interface__["data"][0]
        for _ in range(2)
        for found in rollouts
        for row in found.steps()
    }
    assert len(addresses) == 9
    assert all(address % 64 == 0 for address in addresses)


def test_a_mapped_array_outlives_its_reader(tmp_path: Path) -> None:
    write(tmp_path)
    [first, *_] = open_rollouts(tmp_path).episode("b").steps()
    assert first.arrays["experts"].numpy()[1, 2, 3] == 23 + 10


def test_an_unknown_episode_is_a_key_error(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(KeyError):
        open_rollouts(tmp_path).episode("z")


def test_a_reader_beside_a_writer_sees_what_is_finished(tmp_path: Path) -> None:
    with Output(tmp_path, part_bytes=500) as output:
        finish(output, "a", text="x" * 500)
        finish(output, "b", steps=1)
        output.checkpoint()
        assert open_rollouts(tmp_path).episode_ids() == ["a"]


def test_columns_replace_the_lines(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    assert {Path(name).suffix for name in names(tmp_path)} == {".parquet", ".bin"}
    files = open_rollouts(tmp_path).data_files()
    table = parquet.read_table(files[0])
    assert table.column("reward").to_pylist() == [0.0, 1.0, 2.0] * 2
    assert json.loads(table.column("observation")[1].as_py())["number"] == 1


def test_columns_have_the_same_types_in_every_part(tmp_path: Path) -> None:
    """Also where a part has no arrays or no rewards at all: `datasets` joins them."""
    output = Output(tmp_path, form="parquet", part_bytes=10)
    finish(output, "a")
    output.put_step("b", 0, step(arrays={"image": image(1)}))
    output.finish(episode("b"))
    output.close()
    schemas = [parquet.read_schema(name) for name in open_rollouts(tmp_path).data_files()]
    assert schemas[0].equals(schemas[1])
