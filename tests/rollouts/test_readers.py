# SPDX-License-Identifier: Apache-2.0
"""What was written is read back: rows, arrays on mapped memory, columns."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest

from openenvd.rollouts.episodes import Array, BytesLike, Step
from openenvd.rollouts.errors import OutputDamaged, OutputError, RolloutError
from openenvd.rollouts.folder import column_files, hugging_face, readers, rows
from openenvd.rollouts.folder.layout import FORMATS, JSONL, partial
from openenvd.rollouts.folder.open_files import opened
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import Rollouts, open_rollouts
from openenvd.rollouts.folder.spool import OWN_PART_BYTES
from openenvd.rollouts.json_values import parse
from openenvd.system.extras import install_command

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
def test_everything_written_is_read_back(tmp_path: Path, form: str) -> None:
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


ABC = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2]}


def seen(rollouts: Rollouts) -> dict[str, list[int]]:
    """The numbers of each episode's steps."""
    return {found.id: [row.observation["number"] for row in found.steps()] for found in rollouts}


@pytest.mark.parametrize("form", FORMATS)
def test_a_reader_beside_a_writer_sees_durable_episodes(tmp_path: Path, form: str) -> None:
    """Also of the part that is growing; and goes on to read it when it has been finished since."""
    output = Output(tmp_path, form=form, part_bytes=1500)
    finish(output, "a", text="x" * 500)
    finish(output, "b", steps=2)
    output.checkpoint()
    finish(output, "c", steps=1)
    early = open_rollouts(tmp_path)
    assert (seen(early), early.steps) == ({"a": [0, 1, 2], "b": [0, 1]}, 5)
    assert [Path(name).suffix for name in early.data_files()] == [f".{form}"]
    early.verify()
    kept = list(early.episode("b").steps())
    output.close()
    assert seen(early) == {"a": [0, 1, 2], "b": [0, 1]}
    assert early.episode("b").row["final_observation"] is None
    assert [row.action for row in kept] == [{"move": 0}, {"move": 1}]
    assert seen(open_rollouts(tmp_path)) == {"a": [0, 1, 2], "b": [0, 1], "c": [0]}


@pytest.mark.parametrize("form", FORMATS)
def test_arrays_of_a_growing_part_are_mapped(tmp_path: Path, form: str) -> None:
    with Output(tmp_path, form=form) as output:
        output.put_step("a", 0, step(arrays={"image": image(3)}))
        output.finish(episode("a"))
        output.checkpoint()
        [row] = open_rollouts(tmp_path).episode("a").steps()
        assert bytes(row.arrays["image"].data) == bytes([3]) * 100


@pytest.mark.parametrize("form", FORMATS)
def test_a_recorded_part_is_read_before_its_files_are_renamed(tmp_path: Path, form: str) -> None:
    """What a crash leaves between the two, until the next writer comes."""
    write(tmp_path, form)
    for path in tmp_path.glob("*-0*"):
        path.rename(partial(path))
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert seen(rollouts) == ABC
    assert all(Path(name).exists() for name in rollouts.data_files())


def test_a_reader_sees_the_manifest_before_or_after_it_is_compacted(tmp_path: Path) -> None:
    output = Output(tmp_path)
    for name in "ab":
        finish(output, name)
        output.checkpoint()
    before = (tmp_path / "manifest.jsonl").read_bytes()
    assert seen(open_rollouts(tmp_path)) == {"a": [0, 1, 2], "b": [0, 1, 2]}
    output.close()
    after = (tmp_path / "manifest.jsonl").read_bytes()
    assert (len(before.splitlines()), len(after.splitlines())) == (3, 2)
    assert seen(open_rollouts(tmp_path)) == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_half_a_record_at_the_end_of_the_manifest_is_ignored(tmp_path: Path) -> None:
    output = Output(tmp_path)
    finish(output, "a")
    output.close()
    with (tmp_path / "manifest.jsonl").open("ab") as file:
        file.write(b'{"parts": [{"part": 7, "fi')
    assert open_rollouts(tmp_path).episode_ids() == ["a"]


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_rollout_has_nothing(tmp_path: Path, form: str) -> None:
    Output(tmp_path, form=form).close()
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert (len(rollouts), rollouts.steps, list(rollouts), rollouts.data_files()) == (0, 0, [], [])


@pytest.mark.parametrize("form", FORMATS)
def test_an_episode_without_steps_beside_others_has_none(tmp_path: Path, form: str) -> None:
    output = Output(tmp_path, form=form)
    output.finish(episode("a"))
    output.finish(episode("b", steps=2))
    output.finish(episode("c"))
    output.close()
    assert seen(open_rollouts(tmp_path)) == {"a": [], "b": [0, 1], "c": []}


class Counted:
    """The texts that are parsed from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[bytes] = []
        for reader in (rows, column_files):
            monkeypatch.setattr(reader, "parse", self.parse)

    def parse(self, text: BytesLike) -> object:
        self.texts.append(bytes(text))
        return parse(text)

    @property
    def observations(self) -> int:
        return sum(b"seen" in text for text in self.texts)


@pytest.mark.parametrize("form", FORMATS)
def test_one_episode_is_found_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """However many there are, the row that is parsed is its own."""
    output = Output(tmp_path, form=form)
    for number in range(300):
        finish(output, str(number), steps=1)
    output.close()
    rollouts = open_rollouts(tmp_path)
    counted = Counted(monkeypatch)
    for name in ("299", "0", "150"):
        counted.texts.clear()
        assert rollouts.episode(name).id == name
        assert len(counted.texts) == 1


def only_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> tuple[Counted, rows.StepRow]:
    """The one step of the one episode, and what is parsed from now on."""
    output = Output(folder, form=form)
    finish(output, "a", steps=1)
    output.close()
    found = open_rollouts(folder).episode("a")
    counted = Counted(monkeypatch)
    [row] = found.steps()
    return counted, row


@pytest.mark.parametrize("form", FORMATS)
def test_an_unused_observation_is_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    counted, row = only_step(tmp_path, monkeypatch, form)
    assert (row.number, row.reward, row.done, row.info) == (0, 0.0, False, {})
    assert (row.action, row.arrays, counted.observations) == ({"move": 0}, {}, 0)
    assert row.observation is row.observation
    assert counted.observations == 1


@pytest.mark.parametrize("form", FORMATS)
def test_an_observation_that_is_asked_for_first_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    counted, row = only_step(tmp_path, monkeypatch, form)
    assert row.observation == {"text": "seen", "number": 0}
    assert (row.reward, row.info, counted.observations) == (0.0, {}, 1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("first", ["observation", "reward"])
def test_text_that_only_the_standard_library_parses_is_read_back(
    tmp_path: Path, form: str, first: str
) -> None:
    """Half a surrogate pair, and numbers that are none."""
    output = Output(tmp_path, form=form)
    odd = Step(
        b'{"text":"\\ud83d","worth":NaN}',
        b"1",
        0.0,
        True,
        b'{"far":Infinity}',
    )
    output.put_step("a", 0, odd)
    output.finish(episode("a", final_observation_json=b'"\\ud83d"'))
    output.close()
    found = open_rollouts(tmp_path).episode("a")
    [row] = found.steps()
    getattr(row, first)
    assert row.observation["text"] == "\ud83d"
    assert math.isnan(row.observation["worth"])
    assert row.info == {"far": math.inf}
    assert found.row["final_observation"] == "\ud83d"


@pytest.mark.parametrize("form", FORMATS)
def test_kept_rows_do_not_change(tmp_path: Path, form: str) -> None:
    """Also when they are asked long after, and their row group is no longer in memory."""
    output = Output(tmp_path, form=form, part_bytes=10)
    for name in "abcdef":
        finish(output, name)
    output.close()
    kept = {found.id: list(found.steps()) for found in open_rollouts(tmp_path)}
    for found in kept.values():
        assert [row.observation["number"] for row in found] == [0, 1, 2]


def test_more_parts_than_a_process_may_open_files_are_read(tmp_path: Path) -> None:
    output = Output(tmp_path, part_bytes=10)
    for number in range(2 * readers.MOST_MAPPED):
        output.put_step(str(number), 0, step(arrays={"image": image(number)}))
        output.finish(episode(str(number)))
    output.close()
    rollouts = open_rollouts(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number, found in enumerate(rollouts):
        [row] = found.steps()
        assert row.arrays["image"].numpy()[99] == number
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + readers.MOST_MAPPED + 1


@pytest.mark.parametrize("form", FORMATS)
def test_rollouts_can_be_pickled_for_another_process(tmp_path: Path, form: str) -> None:
    """A data loader's workers get the folder, an episode, or a step; arrays are copied then."""
    write(tmp_path, form)
    rollouts = open_rollouts(tmp_path)
    [row, *_] = rollouts.episode("b").steps()
    assert row.arrays["image"].numpy()[0] == 0
    there = pickle.loads(pickle.dumps(rollouts))
    assert seen(there) == ABC
    [again, *_] = pickle.loads(pickle.dumps(there.episode("b"))).steps()
    for copied in (again, pickle.loads(pickle.dumps(row)), pickle.loads(pickle.dumps(again))):
        assert (copied.info, copied.arrays["experts"].numpy()[0, 0, 0]) == ({"note": "b"}, 10)


def test_an_opened_folder_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader's processes may have another working directory."""
    write(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    rollouts = open_rollouts("out")
    monkeypatch.chdir("/")
    assert seen(pickle.loads(pickle.dumps(rollouts))) == ABC


def test_threads_may_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    rollouts = open_rollouts(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(seen, [rollouts] * 8))
    assert found == [ABC] * 8


def test_arrays_without_elements_or_dimensions_are_numpys(tmp_path: Path) -> None:
    output = Output(tmp_path)
    made = {"none": Array(b"", "<f4", (0, 3)), "one": Array(b"\x00\x00\x80\x3f", "<f4", ())}
    output.put_step("a", 0, step(arrays=made))
    output.finish(episode("a"))
    output.close()
    [row] = open_rollouts(tmp_path).episode("a").steps()
    assert row.arrays["none"].numpy().shape == (0, 3)
    assert row.arrays["one"].numpy() == np.float32(1)


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_was_cut_is_damaged(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    for path in tmp_path.glob("steps-*"):
        os.truncate(path, 300)
    with pytest.raises(OutputDamaged):
        seen(open_rollouts(tmp_path))


@pytest.mark.parametrize(("form", "broken"), [("jsonl", b'"seen"'), ("parquet", b"PAR1")])
def test_a_file_with_other_bytes_is_damaged(tmp_path: Path, form: str, broken: bytes) -> None:
    output = Output(tmp_path, form=form)
    finish(output, "a")
    output.close()
    path = tmp_path / f"steps-00000.{form}"
    path.write_bytes(path.read_bytes().replace(broken, b"\xff" * len(broken)))
    with pytest.raises(OutputDamaged):
        seen(open_rollouts(tmp_path))
    with pytest.raises(OutputDamaged, match="has changed since it was written"):
        open_rollouts(tmp_path).verify()


def test_arrays_that_were_cut_are_damaged(tmp_path: Path) -> None:
    write(tmp_path)
    os.truncate(tmp_path / "arrays-00000.bin", 200)
    with pytest.raises(OutputDamaged, match="ends before the array"):
        [row.arrays for row in open_rollouts(tmp_path).episode("b").steps()]


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_file_is_named_in_the_error(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    (tmp_path / f"steps-00000.{form}").unlink()
    with pytest.raises(OutputDamaged, match=rf"steps-00000\.{form} is missing"):
        seen(open_rollouts(tmp_path))


def test_an_unreadable_file_is_an_output_error(tmp_path: Path) -> None:
    def forbidden(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(OutputError, match="a cannot be read: Permission denied"):
        opened([tmp_path / "a"], forbidden)


@pytest.mark.parametrize(
    ("module", "form"), [("numpy", "jsonl"), ("pyarrow", "arrow"), ("pyarrow.parquet", "parquet")]
)
def test_a_missing_extra_is_reported_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, form: str
) -> None:
    write(tmp_path, form)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RolloutError, match=f"the module {module} is not installed") as told:
        [row.arrays["image"].numpy() for found in open_rollouts(tmp_path) for row in found.steps()]
    assert told.value.hint == install_command("arrow")


def test_an_old_version_of_datasets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had no type for values of any form."""
    old = ModuleType("datasets")
    old.__dict__["__version__"] = "3.0.0"
    monkeypatch.setitem(sys.modules, "datasets", old)
    with pytest.raises(RolloutError, match=r"datasets 3\.0\.0 has no type for JSON"):
        hugging_face.features()


def test_without_datasets_a_dataset_says_how_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RolloutError, match="datasets is not installed") as told:
        open_rollouts(tmp_path).dataset()
    assert told.value.hint == "pip install -U datasets"


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
