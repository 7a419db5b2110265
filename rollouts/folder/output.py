# SPDX-License-Identifier: Apache-2.0
"""A folder of rollouts while it is written: the one place that decides what exists.

    put_step ─▶ Spool ─finish─▶ small: copied into the growing part ─checkpoint─▶ manifest
                                large: a part of its own ────────────────────────▶ manifest

Called from one thread at a time, which is the writer's; blocks as long as the disk takes. Only
whole parts are synced by other threads: nobody writes to them any more. For the order of writing,
syncing, recording and renaming see `manifest`.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from ..episodes import BytesLike, Episode, Step
from ..errors import EpisodeRefused, OutputBusy
from .columnar import arrow, in_columns
from .disk import Disk, typed
from .layout import FORMATS, JSONL, LOCK, SPOOL, Verdict, is_ours, partial
from .manifest import Checkpoint, Manifest
from .part import OpenPart, publish
from .spool import LARGE_BYTES, OWN_PART_BYTES, Spool, to_spill

PART_BYTES = 64 << 20  # of the growing part, until the next one begins
SYNC_THREADS = 2
MOST_UNPUBLISHED = 16  # parts that are recorded together
SPOOL_BYTES = 16 << 20  # of all unfinished episodes, in memory
NO_VERDICT = Verdict()

Ended = tuple[Spool, Episode, Verdict]
Together = tuple[Sequence[OpenPart], Sequence[Future[None]]]  # exist together, or not at all


class Output:
    """A folder that is open for writing."""

    def __init__(
        self,
        folder: Path,
        *,
        form: str = JSONL,
        disk: Disk | None = None,
        part_bytes: int = PART_BYTES,
        spool_bytes: int = SPOOL_BYTES,
    ) -> None:
        if form not in FORMATS:
            raise ValueError(f"rollouts are written as {', '.join(FORMATS)}, not {form!r}")
        if form != JSONL:
            arrow()  # said now, not when the first part is whole
        self.folder = folder
        self._form = form
        self._disk = disk or Disk()
        self._part_bytes = part_bytes
        self._spool_bytes = spool_bytes
        self._spools: dict[str, Spool] = {}
        self._spooled = 0
        self._number = -1
        self._in_memory_bytes = 0
        self._unpublished: list[Together] = []  # whole, and being synced
        self._syncing = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="rollout-sync")
        self._checkpointed = 0  # how many of the growing part's episodes
        self._spool_folder = folder / SPOOL
        self._observations: dict[str, Path] = {}  # of episodes that wait for their group
        self._lock = _lock(folder)
        try:
            self._begin()
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def finished_episode_ids(self) -> frozenset[str]:
        """Of earlier runs and of this one."""
        return frozenset(self._finished)

    def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Adds a step of an unfinished episode, which no reader sees."""
        spool = self._spools.get(episode_id)
        if spool is None:
            spool = self._spools[episode_id] = self._new_spool(episode_id)
        before_bytes = spool.in_memory_bytes
        spool.add(number, step)
        self._in_memory_bytes += spool.in_memory_bytes - before_bytes
        self._spill(spool)

    def keep_observation(self, episode_id: str, text: BytesLike) -> Path:
        """Writes the last observation of an episode that waits for its group to a file.

        Any thread may read it until the episode is finished or discarded.
        """
        self._spooled += 1
        path = self._observations[episode_id] = self._spool_folder / f"{self._spooled}.last"
        self._disk.append(path, [text])
        return path

    def discard(self, episode_id: str) -> None:
        """Forgets the steps of this attempt."""
        if path := self._observations.pop(episode_id, None):
            path.unlink(missing_ok=True)
        spool = self._spools.pop(episode_id, None)
        if spool is not None:
            self._in_memory_bytes -= spool.in_memory_bytes
            spool.forget()

    def finish(self, episode: Episode, verdict: Verdict = NO_VERDICT) -> None:
        """Finishes an episode, which exists after the next `checkpoint`.

        Raises:
            EpisodeRefused: It was finished before, or a step is missing. Its steps are forgotten.
        """
        self.finish_together([(episode, verdict)])

    def finish_together(self, members: Sequence[tuple[Episode, Verdict]]) -> None:
        """Finishes several episodes, which exist after the next `checkpoint`: all, or none.

        Raises:
            EpisodeRefused: As above, of one of them. The steps of all are forgotten.
        """
        try:
            ended = [(self._ended(*one), *one) for one in members]
            large = [one for one in ended if one[0].size_bytes >= OWN_PART_BYTES]
            if large:
                self._finish_as_parts(large, [one for one in ended if one not in large])
            else:
                self._finish_in_the_growing_part(ended)
            self._finished |= {episode.id for episode, _ in members}
        finally:
            for episode, _ in members:
                self.discard(episode.id)

    def checkpoint(self) -> bool:
        """Makes all finished episodes durable. Returns False where nothing was new."""
        large = bool(self._unpublished)
        self._publish_all()
        ids = self._growing.episode_ids[self._checkpointed :]
        if not ids:
            return large
        part = self._growing
        part.sync()
        self._disk.sync(self.folder)
        self._manifest.checkpoint(Checkpoint(part.number, part.sizes, tuple(ids), part.steps))
        self._checkpointed = len(part.episode_ids)
        return True

    def close(self) -> None:
        """Makes all finished episodes durable, forgets the others, and compacts the manifest."""
        self._forget_unfinished()
        self._finish_growing()
        self._manifest.compact()
        self.release()

    def save(self) -> None:
        """Makes finished episodes durable after an error of the disk.

        Unfinished ones are forgotten first, so that there is room for the record.
        """
        self._forget_unfinished()
        self._growing.cut(self._whole)
        self._unpublished = [
            one for one in self._unpublished if not any(synced.exception() for synced in one[1])
        ]
        kept = [part for together, _ in self._unpublished for part in together]
        self._remove_unknown(but=[self._growing, *kept])
        self.checkpoint()

    def release(self) -> None:
        """Releases the folder for other writers. What was not checkpointed is lost."""
        self._syncing.shutdown()
        self._lock.close()

    def _begin(self) -> None:
        """Repairs what an earlier writer left, however it ended."""
        self._manifest = Manifest(self.folder, self._disk)
        self._known = self._manifest.known
        with typed(self._spool_folder):
            shutil.rmtree(self._spool_folder, ignore_errors=True)
            self._spool_folder.mkdir()
        for part in self._known.parts.values():
            publish(self.folder, part, self._disk)
        self._disk.sync(self.folder)
        if self._known.growing is not None:
            self._take_up(self._known.growing)
        self._remove_unknown()
        self._finished = self._known.episode_ids()
        self._grow_anew()

    def _take_up(self, growing: Checkpoint) -> None:
        """Finishes the part that was growing, as far as it is durable."""
        part = OpenPart.resume(
            self.folder, growing.part, growing.sizes, growing.episode_ids, self._disk
        )
        part.steps = growing.steps
        self._sync_later(part)
        self._publish_all()

    def _remove_unknown(self, but: Sequence[OpenPart] = ()) -> None:
        """Removes partial files, and finished ones that the manifest does not have."""
        wanted = {file.name for part in self._known.parts.values() for file in part.files}
        for part in but:
            wanted |= {partial(file.path).name for file in part.files.values()}
        for path in self.folder.iterdir():
            if is_ours(path.name) and path.name not in wanted:
                path.unlink()

    def _new_spool(self, episode_id: str) -> Spool:
        self._spooled += 1
        return Spool.begin(episode_id, self._spool_folder, self._spooled)

    def _spill(self, spool: Spool) -> None:
        """Writes steps of unfinished episodes to the spool where they exceed their allowance."""
        if self._in_memory_bytes > self._spool_bytes:
            sizes = [(s.episode_id, s.in_memory_bytes) for s in self._spools.values()]
            chosen = to_spill(sizes, self._spool_bytes // 2)
        elif spool.in_memory_bytes >= LARGE_BYTES:
            chosen = [spool.episode_id]
        else:
            return
        for episode_id in chosen:
            other = self._spools[episode_id]
            self._in_memory_bytes -= other.in_memory_bytes
            other.spill(self._disk)

    def _ended(self, episode: Episode, verdict: Verdict) -> Spool:
        """Returns the steps of an episode that may be finished."""
        if verdict.filtered is not None:
            self.discard(episode.id)
        else:
            for number, step in enumerate(episode.steps):
                self.put_step(episode.id, number, step)
        spool = self._spools.get(episode.id) or self._new_spool(episode.id)
        if episode.id in self._finished:
            raise EpisodeRefused(f"episode {episode.id} was finished before")
        if spool.fault is not None:
            raise EpisodeRefused(f"episode {episode.id} is not whole: {spool.fault}")
        return spool

    def _finish_as_parts(self, large: Sequence[Ended], small: Sequence[Ended]) -> None:
        """Makes a part of each large episode and one of all small ones, with one record."""
        parts = [self._new_part() for _ in large]
        for part, one in zip(parts, large, strict=True):
            self._in_memory_bytes -= one[0].in_memory_bytes
            one[0].spill(self._disk)
            part.adopt(*one)
        if small:
            parts.append(self._new_part())
            for one in small:
                parts[-1].add(*one)
        self._sync_later(*parts)
        if sum(len(together) for together, _ in self._unpublished) >= MOST_UNPUBLISHED:
            self._publish_all()

    def _finish_in_the_growing_part(self, ended: Sequence[Ended]) -> None:
        """Adds episodes to the growing part, with no record and no new part between them."""
        for one in ended:
            self._growing.add(*one)
        self._whole = self._growing.mark
        if self._growing.size_bytes >= self._part_bytes:
            self._finish_growing()
            self._grow_anew()

    def _finish_growing(self) -> None:
        if self._growing.episode_ids:
            self._sync_later(self._growing)
        self._publish_all()

    def _sync_later(self, *together: OpenPart) -> None:
        """Syncs whole parts on other threads, while further ones are written."""
        synced = [self._syncing.submit(part.sync) for part in together]
        self._unpublished.append((together, synced))

    def _publish_all(self) -> None:
        """Waits until whole parts are synced, records them and renames their files."""
        if not self._unpublished:
            return
        parts = [part for together, _ in self._unpublished for part in together]
        for _, synced in self._unpublished:
            for one in synced:
                one.result()
        finished = [
            part.finished() if self._form == JSONL else in_columns(part, self._form, self._disk)
            for part in parts
        ]
        self._disk.sync(self.folder)
        self._manifest.add(finished)
        for whole in finished:
            publish(self.folder, whole, self._disk)
        self._disk.sync(self.folder)
        for part, whole in zip(parts, finished, strict=True):
            part.forget(but=whole)
        self._unpublished = []

    def _grow_anew(self) -> None:
        self._growing = self._new_part()
        self._checkpointed = 0
        self._whole = self._growing.mark

    def _new_part(self) -> OpenPart:
        self._number = max(self._number + 1, self._known.next_number)
        return OpenPart(self.folder, self._number, self._disk)

    def _forget_unfinished(self) -> None:
        for episode_id in {*self._observations, *self._spools}:
            self.discard(episode_id)


def _lock(folder: Path) -> Any:
    """Locks the folder until the file is closed, also by a crash."""
    with typed(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise OutputBusy(f"another rollout writes to {folder}") from exc
    return file
