# SPDX-License-Identifier: Apache-2.0
"""Writes rollouts to a folder from threads, so that no event loop ever waits for a disk.

`RolloutWriter` is on the loop, `Output` on its threads; `folder/__init__.py` draws the flow. There
is no queue: memory holds a chunk of each running episode and recently ended episodes, both bounded,
and a slow disk slows the episodes down. When the disk fails, all waiting and later calls raise the
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from ..episodes import Episode, Step
from ..errors import EpisodeRefused, OutputBusy, RolloutError, WriterClosed, of_os_error
from .damage import FolderCheck
from .disk import Disk
from .packs import finish_interrupted, next_number, pack, small_files, write_pack
from .readers import EPISODES, FILE, GROUP, LOCK, PACKS, UNFINISHED, file_name
from .rows import END_OF_LAST, LARGE_BYTES, EpisodeFile, Verdict

BUFFER_BYTES = 256 << 20
CHUNK_BYTES = 256 << 10  # of one episode, in memory
HELD_SHARE = 4  # of the buffer: a quarter is for chunks, the rest for steps that are being written
COMMIT_SECONDS = 0.5  # between commits; small episodes of one commit share a file
MAX_ENDED = 4096  # episodes that are not committed yet
THREADS = 2
MAX_NAME = 200  # characters of a file's name, which is made from the id
NO_VERDICT = Verdict()
MAX_FILES = 4096  # made by a writer before it packs small ones
MIN_PACKED = 64  # small files, when a rollout has ended

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Output:
    """A folder that is open for writing; makes ended episodes durable in the right order.

    The writer calls one method at a time from its threads. A method blocks on the disk.
    """

    def __init__(self, folder: Path, disk: Disk, group: int = 1) -> None:
        """Lock the folder, complete an earlier writer's work, and set damaged files aside.

        Raises `OutputBusy`: another rollout writes to it.
        """
        self.folder = folder
        self._disk = disk
        self._numbers = count()
        self._made = 0  # files, since small ones were packed
        self._lock = _lock(folder)
        try:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            for name in (EPISODES, PACKS, UNFINISHED):
                (folder / name).mkdir(exist_ok=True)
            self._packs = count(next_number(folder))
            self._found = FolderCheck(folder, disk, group)
            self._found.run(self._new_pack)
            finish_interrupted(folder, disk)
            self._found.look()
            self.earlier = frozenset(self._found.episodes)
        except BaseException:
            self._lock.close()
            raise

    def commit(self, ended: Sequence[Sequence[EpisodeFile]]) -> None:
        """Write these episodes and groups; return when all exist. A group exists as a whole.

        Episodes that are only in memory become one pack. One `sync` of a folder makes all files
        durable that were written and renamed before it.
        """
        small = [files for files in ended if not any(file.size_bytes for file in files)]
        large = [files for files in ended if any(file.size_bytes for file in files)]
        if small:
            unfinished, final = self._new_pack()
            members = {file.episode_id: file for files in small for file in files}
            contents = ((name, file.content()) for name, file in members.items())
            write_pack(contents, unfinished, final, self._disk)
            self._found.add(final, list(members))
            self._made += 1
        for files in large:
            self._rename(files)
        if large:
            self._disk.sync(self.folder / EPISODES)
        if self._made >= MAX_FILES:
            self._pack()

    def check(self) -> tuple[frozenset[str], list[str]]:
        """Set files aside that other programs have damaged since the last check.

        Returns:
            The lost episodes, and the findings, for people.
        """
        self._found.run(self._new_pack)
        lost, words = frozenset(self._found.lost), self._found.words
        self._found.lost, self._found.words = set(), []
        return lost, words

    def close(self, *, has_ended: bool) -> None:
        """Drop unfinished episodes and release the lock; pack small files if it has ended."""
        try:
            if has_ended:
                self._pack()
        finally:
            shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)
            self._lock.close()

    def _rename(self, files: Sequence[EpisodeFile]) -> None:
        for file in files:
            file.write(self._disk, write_back=True)
            self._disk.sync(file.path, drop_cached=file.size_bytes >= LARGE_BYTES)
        folder = self.folder / EPISODES
        if len(files) > 1:
            together = self.unfinished()
            together.mkdir()
            for file in files:
                self._disk.rename(file.path, together / file_name(file.episode_id))
            folder /= GROUP + file_name(files[0].episode_id).removesuffix(FILE)
            self._disk.rename(together, folder)
        else:
            self._disk.rename(files[0].path, folder / file_name(files[0].episode_id))
        for file in files:
            path = folder / file_name(file.episode_id)
            self._found.add(path, [file.episode_id], is_touched=file.is_touched)
        self._made += len(files)

    def _pack(self) -> None:
        self._made = 0
        self._found.run(self._new_pack)
        files = small_files(self.folder)
        if len(files) >= MIN_PACKED:
            pack(self.folder, files, self._packs, self.unfinished(), self._disk)
            self._found.look()

    def _new_pack(self) -> tuple[Path, Path]:
        return self.unfinished(), self.folder / PACKS / f"{next(self._packs):05}{FILE}"

    def unfinished(self) -> Path:
        """Return an unused name; an episode's id may be any text."""
        return self.folder / UNFINISHED / str(next(self._numbers))


def _lock(folder: Path) -> Any:
    """Lock the folder until the file is closed, which a crash also does."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise OutputBusy(f"another rollout writes to {folder}") from exc
    return file


class RolloutWriter:
    """Writes steps and finished episodes (a `StepSink`) to a folder; see `open`."""

    def __init__(self, output: Output, disk: Disk, buffer_bytes: int) -> None:
        self._output = output
        self._disk = disk
        self._most_held_bytes = buffer_bytes // HELD_SHARE
        self._held_bytes = 0
        self._finished = set(output.earlier)
        self._files: dict[str, EpisodeFile] = {}
        self._ended: list[Sequence[EpisodeFile]] = []
        self._committing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()  # to commit at once
        self._failure: RolloutError | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rollout-writer")

    @classmethod
    async def open(
        cls,
        folder: Path | str,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        group: int = 1,
        disk: Disk | None = None,
    ) -> Self:
        """Open a folder for writing, and complete an earlier writer's work.

        Args:
            folder: The folder, which is created if it is missing.
            buffer_bytes: Most memory for data that is not written yet.
            group: Number of episodes in a group; if one is damaged, all are set aside.
            disk: Writes and syncs files; a subclass of `Disk` may be slow, or fail.

        Raises:
            OutputBusy: Another rollout writes to the folder.
            OutputFull, OutputUnwritable: The file system refuses.
        """
        disk = disk or Disk()
        try:
            output = await asyncio.to_thread(Output, Path(folder), disk, group)
        except OSError as exc:
            raise of_os_error(exc, exc.filename or folder) from exc
        return cls(output, disk, buffer_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, exc: object, traceback: object) -> None:
        if exc is None:
            await self.close()
            return
        with contextlib.suppress(Exception):  # the first error is the one to tell
            await asyncio.shield(self._close(has_ended=False))

    def finished_episode_ids(self) -> frozenset[str]:
        """Return the ids of episodes that the folder had when it was opened."""
        return self._output.earlier

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Add a step of an unfinished episode; waits for the disk if the buffer is full.

        Raises `OutputError`: the writer has failed.
        """
        self._check()
        file = self._file(episode_id)
        self._held_bytes += file.add(number, step)
        await self._write_if_large(file)

    async def discard(self, episode_id: str) -> None:
        """Drop the steps of this attempt."""
        file = self._files.pop(episode_id, None)
        if file is not None:
            self._held_bytes -= file.pending_bytes
            if file.size_bytes:
                await self._run(lambda: self._disk.remove(file.path))

    async def finish(self, episode: Episode) -> None:
        """Finish an episode. It exists in about `COMMIT_SECONDS`, and once `close` returns.

        Raises:
            EpisodeRefused: It was finished before, or a step is missing. Its steps are dropped.
            OutputError: The writer has failed.
        """
        await self.finish_together([(episode, NO_VERDICT)])

    async def finish_together(self, members: Sequence[tuple[Episode, Verdict]]) -> None:
        """Finish several episodes: even after a crash, either all of them exist or none.

        Raises:
            EpisodeRefused: One of them cannot be finished. The steps of all are dropped.
            OutputError: The writer has failed.
        """
        self._check()
        try:
            kept = [episode.id for episode, verdict in members if verdict.filtered is None]
            files = [await self._ended_file(*member, kept) for member in members]
        except EpisodeRefused:
            for episode, _ in members:
                await self.discard(episode.id)
            raise
        for file in files:
            self._finished.add(file.episode_id)
            self._files.pop(file.episode_id, None)
        self._ended.append(files)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit(), name="committing")
        while self._is_full and (committing := self._committing) is not None:
            self._hurry.set()
            await asyncio.shield(committing)
            self._check()

    @property
    def _is_full(self) -> bool:
        return len(self._ended) > MAX_ENDED or self._held_bytes > self._most_held_bytes

    async def keep_observation(self, episode_id: str, text: bytes) -> Callable[[], bytes]:
        """Keep the last observation in the episode's file, or in memory.

        Returns:
            A function that reads it until the episode is finished, and may block.

        Raises `OutputError`: the writer has failed.
        """
        self._check()
        file = self._file(episode_id)
        self._held_bytes += file.add_last(text)
        await self._write_if_large(file)
        if file.pending_bytes:
            return lambda: text
        offset = file.size_bytes - len(END_OF_LAST) - len(text)
        return partial(_read, file.path, offset, len(text))

    async def put(self, episode: Episode) -> None:
        """Write a whole episode with its steps."""
        for number, step in enumerate(episode.steps):
            await self.put_step(episode.id, number, step)
        await self.finish(episode)

    async def check(self) -> tuple[frozenset[str], list[str]]:
        """Commit ended episodes, and set files aside that other programs have damaged.

        Returns:
            The lost episodes, which have to be played again, and the findings, for people; both
            include those of `open`.

        Raises `OutputError`: the writer has failed.
        """
        await self._commit_all()
        self._check()
        lost, words = await self._run(self._output.check)
        self._finished -= lost
        return lost, words

    async def close(self) -> None:
        """Return when all finished episodes exist; drop the others, and pack small files.

        Raises `OutputError`: the writer has failed, now or before.
        """
        await asyncio.shield(self._close(has_ended=True))
        if self._failure is not None:
            raise self._failure

    async def _close(self, *, has_ended: bool) -> None:
        if self._closed:
            return
        self._closed = True
        await self._commit_all()
        has_ended = has_ended and self._failure is None
        with contextlib.suppress(RolloutError):  # the caller of the next method gets it
            await self._run(lambda: self._output.close(has_ended=has_ended))
        await asyncio.to_thread(self._threads.shutdown)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise WriterClosed("the rollouts' writer is closed")

    def _file(self, episode_id: str) -> EpisodeFile:
        if episode_id not in self._files:
            self._files[episode_id] = EpisodeFile(episode_id, self._output.unfinished())
        return self._files[episode_id]

    async def _ended_file(
        self, episode: Episode, verdict: Verdict, kept: Sequence[str]
    ) -> EpisodeFile:
        """Add the last lines to the file of an episode that may be finished, and return it.

        One of the `kept` ids that is a branch of the episode needs its steps.
        """
        if episode.id in self._finished:
            raise EpisodeRefused(f"episode {episode.id} was finished before")
        if len(file_name(episode.id)) > MAX_NAME:
            raise EpisodeRefused(f"the id of episode {episode.id[:40]}… is too long for a file")
        is_needed = any(each.startswith(f"{episode.id}.") for each in kept)
        if verdict.filtered is not None and not is_needed:
            await self.discard(episode.id)
        file = self._file(episode.id)
        if file.steps and file.first_step != (episode.branched_at or 0):
            file.fault = file.fault or f"step {file.first_step} came after 0 steps"
        if file.fault is not None:
            raise EpisodeRefused(f"episode {episode.id} is not whole: {file.fault}")
        self._held_bytes += file.add_end(episode, verdict)
        return file

    async def _write_if_large(self, file: EpisodeFile) -> None:
        held_bytes = file.pending_bytes
        if held_bytes >= CHUNK_BYTES or self._held_bytes > self._most_held_bytes:
            await self._run(lambda: file.write(self._disk))
            self._held_bytes -= held_bytes

    async def _commit_all(self) -> None:
        while self._committing is not None:
            self._hurry.set()
            await self._committing

    async def _commit(self) -> None:
        """Commit the episodes of the next `COMMIT_SECONDS`, and repeat while further ones end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), COMMIT_SECONDS)
        self._hurry.clear()
        ended, self._ended = self._ended, []
        held_bytes = sum(file.pending_bytes for files in ended for file in files)
        with contextlib.suppress(RolloutError):  # kept in `_failure`
            await self._run(partial(self._output.commit, ended))
        self._held_bytes -= held_bytes
        self._committing = None
        if self._ended and self._failure is None:
            self._committing = asyncio.create_task(self._commit(), name="committing")

    async def _run(self, call: Callable[[], _T]) -> _T:
        """Call a function on a thread. An error ends the writing."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except Exception as exc:
            if self._failure is not None:
                pass
            elif isinstance(exc, OSError):
                path = exc.filename2 or exc.filename or self._output.folder
                self._failure = of_os_error(exc, path)
            elif isinstance(exc, RolloutError):
                self._failure = exc
            else:
                log.error("the rollouts' writer failed", exc_info=exc)
                self._failure = RolloutError(f"the rollouts' writer failed: {exc!r}")
            raise self._failure from exc


def _read(path: Path, offset: int, size_bytes: int) -> bytes:
    """Read a part of a file; `null` if it was cut or removed, which the commit will find."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            found = file.read(size_bytes)
    except FileNotFoundError:
        return b"null"
    return found if len(found) == size_bytes else b"null"
