# SPDX-License-Identifier: Apache-2.0
"""A folder of rollouts: an episode is there as a whole and once, or not at all."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from openenvd.rollouts.episodes import BytesLike
from openenvd.rollouts.errors import (
    EpisodeRefused,
    OutputBusy,
    OutputDamaged,
    OutputFull,
    OutputUnwritable,
    RolloutError,
)
from openenvd.rollouts.folder import manifest
from openenvd.rollouts.folder.disk import Disk
from openenvd.rollouts.folder.layout import Verdict
from openenvd.rollouts.folder.output import Output
from openenvd.rollouts.folder.readers import open_rollouts
from openenvd.rollouts.folder.spool import LARGE_BYTES, OWN_PART_BYTES, to_spill
from openenvd.system.extras import install_command

from .made import episode, finish, image, names, step

LARGE = "x" * (OWN_PART_BYTES // 2)


def ids(folder: Path) -> list[str]:
    return open_rollouts(folder).episode_ids()


def test_a_finished_episode_is_read_back(tmp_path: Path) -> None:
    output = Output(tmp_path)
    finish(output, "a", steps=3)
    output.close()
    rollouts = open_rollouts(tmp_path)
    [found] = rollouts
    assert [s.observation["number"] for s in found.steps()] == [0, 1, 2]
    assert (found.row["total_reward"], found.row["status"], rollouts.steps) == (1.0, "done", 3)
    assert names(tmp_path) == ["episodes-00000.jsonl", "steps-00000.jsonl"]


def test_episodes_that_run_at_once_lie_one_after_the_other(tmp_path: Path) -> None:
    output = Output(tmp_path)
    for number in range(3):
        for name in "abc":
            output.put_step(name, number, step(number, name))
    for name in "cab":
        output.finish(episode(name))
    output.close()
    for found in open_rollouts(tmp_path):
        assert [s.observation["text"] for s in found.steps()] == [found.id] * 3
    assert ids(tmp_path) == ["c", "a", "b"]


def test_an_episode_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    output = Output(tmp_path)
    output.put_step("a", 0, step(text="x" * LARGE_BYTES))  # on disk already
    output.close()
    assert (ids(tmp_path), names(tmp_path), list((tmp_path / "spool").iterdir())) == ([], [], [])


def test_a_discarded_attempt_is_forgotten_and_the_next_begins_anew(tmp_path: Path) -> None:
    output = Output(tmp_path)
    output.put_step("a", 0, step(text="first" + "x" * LARGE_BYTES))
    output.discard("a")
    output.put_step("a", 0, step(text="second"))
    output.finish(episode("a"))
    output.close()
    [found] = open_rollouts(tmp_path)
    assert [s.observation["text"] for s in found.steps()] == ["second"]


def test_a_missing_step_refuses_the_episode_and_forgets_it(tmp_path: Path) -> None:
    output = Output(tmp_path)
    output.put_step("a", 0, step())
    output.put_step("a", 2, step())
    with pytest.raises(EpisodeRefused, match="step 2 came after 1 steps"):
        output.finish(episode("a"))
    finish(output, "a")
    output.close()
    assert ids(tmp_path) == ["a"]


def test_an_episode_is_finished_once(tmp_path: Path) -> None:
    output = Output(tmp_path)
    finish(output, "a")
    with pytest.raises(EpisodeRefused, match="finished before"):
        finish(output, "a")
    output.close()
    with Output(tmp_path) as again, pytest.raises(EpisodeRefused, match="finished before"):
        finish(again, "a")
    assert ids(tmp_path) == ["a"]


def test_a_large_episode_becomes_a_part_without_being_copied(tmp_path: Path) -> None:
    output = Output(tmp_path)
    finish(output, "small")
    finish(output, "large", steps=3, text=LARGE)
    output.close()
    rollouts = open_rollouts(tmp_path)
    assert {Path(f).name for f in rollouts.data_files()} == {
        "steps-00000.jsonl",
        "steps-00001.jsonl",
    }
    assert [len(s.observation["text"]) for s in rollouts.episode("large").steps()] == [
        len(LARGE)
    ] * 3
    rollouts.verify()


def test_parts_end_at_their_size(tmp_path: Path) -> None:
    output = Output(tmp_path, part_bytes=1000)
    for number in range(10):
        finish(output, str(number), text="x" * 200)
    output.close()
    rollouts = open_rollouts(tmp_path)
    assert (len(rollouts), len(rollouts.data_files())) == (10, 10)
    rollouts.verify()


def test_an_episode_without_steps_is_one(tmp_path: Path) -> None:
    output = Output(tmp_path)
    output.finish(episode("a"))
    output.close()
    [found] = open_rollouts(tmp_path)
    assert list(found.steps()) == []


def test_a_filtered_episode_is_finished_but_has_no_steps(tmp_path: Path) -> None:
    """So that it is not run again."""
    output = Output(tmp_path)
    output.put_step("a", 0, step())
    output.finish(episode("a"), Verdict(filtered="reward"))
    output.close()
    [found] = open_rollouts(tmp_path)
    assert (found.row["filtered"], list(found.steps())) == ("reward", [])
    with Output(tmp_path) as again:
        assert again.finished_episode_ids == {"a"}


def test_texts_with_line_breaks_stay_one_row(tmp_path: Path) -> None:
    output = Output(tmp_path)
    pretty = step()
    output.put_step("a", 0, type(pretty)(b'{\n "text":\r\n "x"}', b"[1,\n2]", 0.0, True))
    output.finish(episode("a", final_observation_json=b"{\n}"))
    output.close()
    [found] = open_rollouts(tmp_path)
    [row] = found.steps()
    assert (row.observation, row.action) == ({"text": "x"}, [1, 2])


def test_unfinished_episodes_go_to_the_disk_beyond_their_allowance(tmp_path: Path) -> None:
    with Output(tmp_path, spool_bytes=10_000) as output:
        for name in "abcdef":
            output.put_step(name, 0, step(text="x" * 3000))
        assert list((tmp_path / "spool").iterdir())


@pytest.mark.parametrize(
    ("sizes", "allowance", "chosen"),
    [
        ({"a": 10, "b": 20}, 30, []),
        ({"a": 10, "b": 20}, 29, ["b"]),
        ({"a": 10, "b": 20, "c": 5}, 9, ["b", "a"]),
        ({"a": LARGE_BYTES, "b": 20}, LARGE_BYTES * 2, ["a"]),
        ({}, 0, []),
    ],
)
def test_the_largest_spools_are_written_first(
    sizes: dict[str, int], allowance: int, chosen: list[str]
) -> None:
    assert to_spill(sizes.items(), allowance) == chosen


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with Output(tmp_path), pytest.raises(OutputBusy):
        Output(tmp_path)
    Output(tmp_path).close()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputUnwritable):
        Output(tmp_path / "file" / "out")


def test_columns_without_pyarrow_are_refused_before_anything_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RolloutError, match="not installed") as told:
        Output(tmp_path, form="parquet")
    assert told.value.hint == install_command("arrow")


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "steps-mine.jsonl", "arrays-1.bin"):
        (tmp_path / name).write_text("mine")
    output = Output(tmp_path)
    output.close()
    assert names(tmp_path) == ["arrays-1.bin", "notes.txt", "steps-mine.jsonl"]


# After a crash. The child is killed at the moment that is looked at; nothing of it can tidy up.


def crash(folder: Path, write: Callable[[Output], object], disk: Disk | None = None) -> None:
    """What a process that is killed in the end leaves of its writing."""
    child = os.fork()
    if child == 0:
        try:
            write(Output(folder, disk=disk, part_bytes=3000))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_only_checkpointed_episodes_survive_a_crash(tmp_path: Path) -> None:
    def write(output: Output) -> None:
        finish(output, "a")
        output.checkpoint()
        finish(output, "b")
        output.put_step("c", 0, step())

    crash(tmp_path, write)
    with Output(tmp_path) as output:
        assert output.finished_episode_ids == {"a"}
        finish(output, "b")
        output.close()
    rollouts = open_rollouts(tmp_path)
    assert rollouts.episode_ids() == ["a", "b"]
    assert [len(list(e.steps())) for e in rollouts] == [3, 3]
    rollouts.verify()


class DiesAt(Disk):
    """Kills the process before the so-manieth thing it does."""

    def __init__(self, countdown: int) -> None:
        self._countdown = countdown

    def _tick(self) -> None:
        self._countdown -= 1
        if self._countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        self._tick()
        half = len(chunks[0]) // 2
        super().write(descriptor, [bytes(chunks[0])[:half]])
        self._tick()  # torn
        super().write(descriptor, [bytes(chunks[0])[half:], *chunks[1:]])

    def sync(self, path: Path, *, drop_cached: bool = False) -> None:
        self._tick()
        super().sync(path, drop_cached=drop_cached)

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)

    def truncate(self, path: Path, size_bytes: int) -> None:
        self._tick()
        super().truncate(path, size_bytes)


def some_of_everything(output: Output) -> None:
    """Small ones, arrays, a checkpoint, a large one, a part that ends, the manifest."""
    for name in "abcd":
        if name not in output.finished_episode_ids:
            output.put_step(name, 0, step(text="x" * 400, arrays={"image": image(ord(name))}))
            output.finish(episode(name))
        output.checkpoint()
    if "large" not in output.finished_episode_ids:
        output.put_step("large", 0, step(text="y" * (OWN_PART_BYTES + 1)))
        output.finish(episode("large"))
    output.close()


@pytest.mark.parametrize("at", range(0, 100, 3))
def test_a_crash_at_any_point_leaves_each_episode_once_or_never(tmp_path: Path, at: int) -> None:
    """And a second crash while the first is mended."""
    crash(tmp_path, some_of_everything, DiesAt(at))
    crash(tmp_path, some_of_everything, DiesAt(at // 3))
    seen = manifest.read(tmp_path).episode_ids()
    output = Output(tmp_path)
    assert output.finished_episode_ids == seen
    some_of_everything(output)
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert sorted(rollouts.episode_ids()) == ["a", "b", "c", "d", "large"]
    assert {n for n in names(tmp_path) if n.endswith(".partial")} == set()
    rows = [e.id for e in rollouts]
    assert sorted(rows) == sorted(rollouts.episode_ids())
    for name in "abcd":
        [row] = rollouts.episode(name).steps()
        assert bytes(row.arrays["image"].data) == bytes([ord(name)]) * 100


def test_no_reader_sees_episodes_that_a_crash_left_unfinished(tmp_path: Path) -> None:
    """Also before anybody has mended it: what a wildcard finds is finished."""
    for at in range(0, 60, 7):
        folder = tmp_path / str(at)
        crash(folder, some_of_everything, DiesAt(at))
        known = manifest.read(folder)
        recorded = {f.name for part in known.parts.values() for f in part.files}
        assert {n for n in names(folder) if not n.endswith((".partial", ".new"))} <= recorded


# What the disk says.


class Full(Disk):
    """Has room for so many bytes; then it is full until `room` is raised."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, descriptor: int, chunks: Sequence[BytesLike]) -> None:
        content = b"".join(chunks)
        super().write(descriptor, [content[: self.room_bytes]])
        self.room_bytes -= len(content)
        if self.room_bytes < 0:
            raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error_and_finished_episodes_are_kept(tmp_path: Path) -> None:
    disk = Full(10_000)
    output = Output(tmp_path, disk=disk)
    finish(output, "a")
    with pytest.raises(OutputFull, match="steps-00000") as told:
        finish(output, "b", text="x" * 10_000)
    assert "finished episodes are kept" in told.value.hint
    disk.room_bytes = 10_000  # freed by forgetting the half
    output.save()
    output.release()
    with Output(tmp_path) as again:
        assert again.finished_episode_ids == {"a"}
        finish(again, "b")
        again.close()
    rollouts = open_rollouts(tmp_path)
    rollouts.verify()
    assert rollouts.episode_ids() == ["a", "b"]


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    Output(tmp_path).close()
    for damaged in ("", "{}\n", "[]\n", "not JSON\n"):
        (tmp_path / "manifest.jsonl").write_text(damaged)
        with pytest.raises(OutputDamaged, match="not a manifest"):
            Output(tmp_path)
    (tmp_path / "manifest.jsonl").write_text('{"schema": "other/9"}\n')
    with pytest.raises(OutputDamaged, match="other/9"):
        open_rollouts(tmp_path)


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": "openenvd.rollouts/1", "parts": []}')
    for opened in (open_rollouts, Output):
        with pytest.raises(OutputDamaged, match="earlier version") as told:
            opened(tmp_path)
        assert "another folder" in told.value.hint


def test_a_folder_without_rollouts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputDamaged, match="no rollouts"):
        open_rollouts(tmp_path)


def test_a_changed_or_missing_file_is_found(tmp_path: Path) -> None:
    output = Output(tmp_path)
    finish(output, "a")
    output.close()
    path = tmp_path / "steps-00000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"seen", b"sEEn"))
    with pytest.raises(OutputDamaged, match="checksum"):
        open_rollouts(tmp_path).verify()
    path.unlink()
    with pytest.raises(OutputDamaged, match="missing"):
        open_rollouts(tmp_path).verify()
