# SPDX-License-Identifier: Apache-2.0
"""Writes rollouts to a folder from one thread, so that no event loop ever waits for a disk.

    event loop                                   writer thread
    reserve ◀── room ── ByteBudget ◀──release──┐
    put_step, discard, finish ──▶ batch ──▶ queue ──▶ Output.put_step, …    one at a time
         ▲                                     └─▶ every second: Output.checkpoint
         └── answers (call_soon_threadsafe) ◀── finish, close

What is handed over goes to the thread in batches of `BATCH_BYTES`, or after `BATCH_SECONDS`: if it
were woken for every step, the two threads would spend their time on waiting for each other's lock.
The queue needs no bound: everything in it has its room in the budget. That opens beyond
`FIRST_BYTES` only where the thread has run out of work while a caller waits for room.

When the disk fails, the thread keeps finished episodes (`Output.save`), all waiting and later calls
raise the error, and what is still queued is dropped with its room.

The thread alone touches the `Output`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ...system.futures import settle, tell_loop
from ..buffers import ByteBudget, Hold
from ..episodes import BytesLike, Episode, Room, Step
from ..errors import EpisodeRefused, RolloutError, WriterClosed
from .disk import Disk
from .layout import JSONL, Verdict
from .output import PART_BYTES, SPOOL_BYTES, Output

BUFFER_BYTES = 256 << 20
CHECKPOINT_SECONDS = 1.0
FIRST_BYTES = 32 << 20  # of the buffer, until it turns out to need more
BATCH_BYTES = 4 << 20
BATCH_SECONDS = 0.01
SPOOL_SHARE = 8  # of the buffer: an eighth is for unfinished episodes
HEAP_SHARE = 4  # and one is lost between blocks of different sizes, on the C library's heap

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)  # not frozen: thousands are made each second
class _Job:
    """What the thread is asked to do; `room` is given back when it is done."""

    run: Callable[[], object]
    room: Room | None = None
    answer: asyncio.Future[None] | None = None
    last: bool = False

    def settle(self, error: BaseException | None) -> None:
        """Releases the room and wakes the caller, from the writer's thread."""
        if self.room is not None:
            self.room.release()
        if self.answer is not None:
            tell_loop(self.answer.get_loop(), settle, self.answer, None, error)


class RolloutWriter:
    """Writes steps and finished episodes (a `StepSink`) to a folder; see `open`."""

    def __init__(self, output: Output, buffer_bytes: int, first_bytes: int = FIRST_BYTES) -> None:
        elsewhere_bytes = buffer_bytes // SPOOL_SHARE + buffer_bytes // HEAP_SHARE
        self.budget = ByteBudget(buffer_bytes - elsewhere_bytes, first_bytes)
        self._output = output
        self._earlier = output.finished_episode_ids
        self._batch: list[_Job] = []  # of the loop
        self._batch_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._jobs: queue.SimpleQueue[list[_Job]] = queue.SimpleQueue()
        self._failure: RolloutError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollout-writer", daemon=True)

    @classmethod
    async def open(
        cls,
        folder: Path | str,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        form: str = JSONL,
        part_bytes: int = PART_BYTES,
        keep_cached: bool = False,
        disk: Disk | None = None,
        first_bytes: int = FIRST_BYTES,
    ) -> Self:
        """Opens a folder for writing, and repairs what an earlier writer left.

        Args:
            folder: Created where it is missing.
            buffer_bytes: Most memory for what was handed over and is not written yet.
            form: `jsonl`, `parquet` or `arrow`.
            part_bytes: Size of the growing part, in bytes, at which the next one begins.
            keep_cached: Leave large episodes in the page cache. Columns always stay, as they are
                made from lines that are read again.
            disk: Writes and syncs files; a subclass of `Disk` may be slow, or fail.
            first_bytes: How far the buffer is open at first.

        Raises:
            OutputBusy: Another rollout writes there.
            OutputDamaged: The folder's manifest cannot be understood.
            OutputFull, OutputUnwritable: The file system refuses.
        """
        spool_bytes = min(SPOOL_BYTES, buffer_bytes // SPOOL_SHARE)

        def begin() -> Output:
            return Output(
                Path(folder),
                form=form,
                disk=disk or Disk(keep_cached=keep_cached or form != JSONL),
                part_bytes=part_bytes,
                spool_bytes=spool_bytes,
            )

        writer = cls(await asyncio.to_thread(begin), buffer_bytes, first_bytes)
        writer._thread.start()
        return writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, exc: object, traceback: object) -> None:
        if exc is None:
            await self.close()
            return
        with contextlib.suppress(Exception):  # the first error is the one to tell
            await asyncio.shield(self.close())

    def finished_episode_ids(self) -> frozenset[str]:
        """The ids of episodes that were in the folder when it was opened."""
        return self._earlier

    async def reserve(self, size_bytes: int) -> Hold:
        """Reserves room for a step of `size_bytes`, and waits for the disk while there is none.

        Raises:
            OutputError: The writer has failed.
        """
        if self.budget.is_full(size_bytes):
            self._flush()  # it waits for what lies here
        return await self.budget.reserve(size_bytes)

    async def put_step(self, episode_id: str, number: int, step: Step, room: Room) -> None:
        """Hands a step over without waiting. Its room is released when it is written."""
        room.resize(step.size_bytes)
        job = _Job(lambda: self._output.put_step(episode_id, number, step), room)
        try:
            self._hand_over(job, step.size_bytes)
        except RolloutError:
            room.release()
            raise

    async def discard(self, episode_id: str) -> None:
        """Forgets the steps of this attempt."""
        self._hand_over(_Job(lambda: self._output.discard(episode_id)))

    async def finish(self, episode: Episode) -> None:
        """Returns when the episode is written; it survives a crash about a second later.

        Raises:
            EpisodeRefused: It was finished before, or a step is missing.
            OutputError: The writer has failed.
        """
        await self._ask(lambda: self._output.finish(episode))

    async def finish_together(self, members: Sequence[tuple[Episode, Verdict]]) -> None:
        """Returns when all of these are written. After a crash all of them exist, or none.

        Raises:
            EpisodeRefused: One was finished before, or a step is missing; none is written then.
            OutputError: The writer has failed.
        """
        await self._ask(lambda: self._output.finish_together(members))

    async def keep_observation(self, episode_id: str, text: BytesLike) -> Path:
        """Writes the last observation of an episode to a file, which stays until it is finished.

        Raises:
            OutputError: The writer has failed.
        """
        paths: list[Path] = []
        await self._ask(lambda: paths.append(self._output.keep_observation(episode_id, text)))
        return paths[0]

    async def put(self, episode: Episode) -> None:
        """Writes a whole episode with its steps."""
        room = await self.reserve(episode.size_bytes)
        await self._ask(lambda: self._output.finish(episode), room, episode.size_bytes)

    async def close(self) -> None:
        """Makes all finished episodes durable, and forgets the others.

        Raises:
            OutputError: The writer has failed, now or before.
        """
        if not self._closed:
            self._closed = True
            answer = asyncio.get_running_loop().create_future()
            self._batch.append(_Job(self._output.close, answer=answer, last=True))
            self._flush()
            with contextlib.suppress(RolloutError):  # raised below
                await asyncio.shield(answer)
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise self._failure

    def _hand_over(self, job: _Job, size_bytes: int = 0) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise WriterClosed("the rollouts' writer is closed")
        self._batch.append(job)
        self._batch_bytes += size_bytes
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._flush)

    def _flush(self) -> None:
        """Passes what was handed over to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch:
            self.budget.busy()
            self._jobs.put(self._batch)
            self._batch, self._batch_bytes = [], 0

    async def _ask(
        self, run: Callable[[], object], room: Room | None = None, size_bytes: int = 0
    ) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._hand_over(_Job(run, room, answer), size_bytes)
        except RolloutError:
            if room is not None:
                room.release()
            raise
        await answer

    # The writer thread.

    def _run(self) -> None:
        with self._output:
            checkpoint_at: float | None = None
            last = False
            while not last:
                batch = self._next(checkpoint_at)
                for job in batch:
                    last = job.last
                    self._do(job)
                if batch and checkpoint_at is None:
                    checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
                checkpoint_at = self._checkpoint_when_due(checkpoint_at, last)

    def _checkpoint_when_due(self, at: float | None, last: bool) -> float | None:
        """Makes a checkpoint if it is due; returns when the next one is."""
        if at is None or last or time.monotonic() < at:
            return at
        if self._failure is None:
            self._attempt(self._output.checkpoint)
        return None

    def _next(self, checkpoint_at: float | None) -> list[_Job]:
        """Returns the next batch; an empty one when a checkpoint is due.

        With nothing to make durable it waits without a time-out; the last job wakes it.
        """
        if self._jobs.empty():
            self.budget.idle()
        try:
            if checkpoint_at is None:
                return self._jobs.get()
            return self._jobs.get(timeout=max(0.0, checkpoint_at - time.monotonic()))
        except queue.Empty:
            return []
        finally:
            self.budget.busy()  # it was given some after it had looked

    def _do(self, job: _Job) -> None:
        job.settle(self._failure or self._attempt(job.run))

    def _attempt(self, run: Callable[[], object]) -> BaseException | None:
        """Runs a job and returns its error. Any error but a refused episode ends the writing."""
        try:
            run()
        except EpisodeRefused as exc:
            return exc
        except Exception as exc:
            self._fail(exc)
            return self._failure
        return None

    def _fail(self, exc: Exception) -> None:
        wrapped = RolloutError(f"the rollouts' writer failed: {exc!r}")
        self._failure = exc if isinstance(exc, RolloutError) else wrapped
        if self._failure is wrapped:
            log.error("the rollouts' writer failed", exc_info=exc)
        self.budget.fail(self._failure)
        try:
            self._output.save()
        except (RolloutError, OSError) as again:
            log.warning("not all finished episodes could be kept: %s", again)
