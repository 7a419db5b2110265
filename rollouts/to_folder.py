# SPDX-License-Identifier: Apache-2.0
"""A rollout into a folder, from wherever an earlier one was interrupted.

    rollout.json: the same? ─▶ writer: which episodes exist? ─▶ collector: the others ─▶ close

Everything about an episode follows from its number, so what is missing can be played at any time.
An episode that failed for good is told, and left out, so that the next rollout into the folder
plays it again; `keep_failed` writes it with what there was of it.

Half of the buffer is for what running episodes hold, half for what waits to be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ..env_host.lag import LagSnapshot
from .collector import RolloutCollector
from .disk import typed
from .episodes import Episode, EpisodeStatus, FailureReason, Room, Step, StepSink, episode_id
from .errors import AllFailed, OtherRollout
from .figures import Figures
from .layout import JSONL
from .named_policy import hint_of, policy_named
from .writer import RolloutWriter

RECORD = "rollout.json"
REPORT_SECONDS = 1.0
HOPELESS_EPISODES = 16  # when as many failed and none came to its end, the rest is not tried
DEFAULT_BUFFER_BYTES = 256 * 2**20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be rolled out. No limit is None."""

    environments: Mapping[str, str]  # what the user called them, and where they answer
    policy: str
    folder: Path
    episodes: int
    concurrency: int = 64
    max_steps: int | None = 100
    step_timeout_seconds: float | None = 60.0
    episode_timeout_seconds: float | None = None
    retries: int = 2
    seed: int | None = None
    reset: Mapping[str, Any] = field(default_factory=dict)
    form: str = JSONL
    keep_failed: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    max_loop_lag_seconds: float | None = None

    def record(self) -> dict[str, Any]:
        """What must be the same for a rollout to be continued."""
        return {
            "environments": list(self.environments),
            "policy": self.policy,
            "seed": self.seed,
            "max_steps": self.max_steps,
            "reset": dict(self.reset),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """How far it is."""

    wanted: int
    earlier: int  # episodes that were there already
    figures: Figures
    lag: LagSnapshot

    def message(self) -> str:
        """For the line that moves."""
        figures = self.figures
        parts = [
            f"{self.earlier + figures.episodes}/{self.wanted} episodes",
            f"{figures.steps_per_second():,.0f} steps/s",
        ]
        if figures.mean_reward is not None:
            parts.append(f"mean reward {figures.mean_reward:.3g}")
        if failed := figures.finished[EpisodeStatus.FAILED]:
            parts.append(f"{failed} failed")
        if figures.retries:
            parts.append(f"{figures.retries} tried again")
        lag = self.lag
        parts.append(f"lag p99 {lag.p99_seconds * 1000:.0f} max {lag.max_seconds * 1000:.0f} ms")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "wanted": self.wanted,
            "earlier": self.earlier,
            **self.figures.to_json(),
            "lag": self.lag.to_json(),
        }


async def roll_out(
    order: Order, on_report: Callable[[Report], None], say: Say = lambda _: None
) -> dict[str, Any]:
    """The last report as JSON, with the folder. `on_report` is called on a thread, and may block.

    Raises:
        RolloutError
    """
    addresses = list(order.environments.values())
    policy = await policy_named(order.policy, addresses[0])
    await asyncio.to_thread(claim_folder, order)
    collector = RolloutCollector(
        addresses,
        policy,
        concurrency=min(order.concurrency, order.episodes),
        max_steps=order.max_steps,
        step_timeout_seconds=order.step_timeout_seconds,
        episode_timeout_seconds=order.episode_timeout_seconds,
        retries=order.retries,
        seed=order.seed,
        reset=order.reset,
        buffer_bytes=order.buffer_bytes // 2,
        max_loop_lag_seconds=order.max_loop_lag_seconds,
    )
    async with _writer(order) as writer:
        existing = writer.finished_episode_ids()
        numbers = missing(order.episodes, existing)
        earlier = order.episodes - len(numbers)
        if earlier:
            say(f"{earlier} of {order.episodes} episodes are there already")
        sink = _Chosen(writer, say, hint_of(order.policy), keep_failed=order.keep_failed)
        async with _reporting(collector, order.episodes, earlier, on_report):
            await collector.collect(numbers, sink)
    report = Report(order.episodes, earlier, collector.figures, collector.lag.snapshot())
    _refuse_a_total_failure(report, sink)
    return {**report.to_json(), "out": str(order.folder)}


def missing(episodes: int, existing: frozenset[str]) -> list[int]:
    """The numbers of the episodes that are not there yet."""
    return [number for number in range(episodes) if episode_id(number) not in existing]


def claim_folder(order: Order) -> None:
    """Make the folder this rollout's.

    Raises:
        OtherRollout: it is another one's.
        OutputUnwritable, OutputFull
    """
    path = order.folder / RECORD
    with typed(path):
        order.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            before = orjson.loads(path.read_bytes())
            differing = [k for k, v in order.record().items() if before.get(k) != v]
            if differing:
                raise _other_rollout(order.folder, differing[0], before, order.record())
            return
        partial = path.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(order.record(), option=orjson.OPT_INDENT_2))
        partial.replace(path)


def _other_rollout(
    folder: Path, key: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> OtherRollout:
    return OtherRollout(
        f"{folder} holds a rollout with other {key}: {before.get(key)!r}, not {now[key]!r}",
        "write to another folder, or ask for the same as before to continue it",
    )


@asynccontextmanager
async def _writer(order: Order) -> AsyncIterator[RolloutWriter]:
    """Closed whatever happens: what has finished is kept."""
    writer = await RolloutWriter.open(
        order.folder, buffer_bytes=order.buffer_bytes // 2, form=order.form
    )
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            await asyncio.shield(writer.close())
        raise
    await writer.close()


@asynccontextmanager
async def _reporting(
    collector: RolloutCollector, wanted: int, earlier: int, on_report: Callable[[Report], None]
) -> AsyncIterator[None]:
    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            told = Report(wanted, earlier, collector.figures, collector.lag.snapshot())
            await asyncio.to_thread(on_report, told)

    reporting = asyncio.create_task(report(), name="reporting")
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.wait([reporting])


class _Chosen:
    """The writer's `StepSink`, without the episodes that failed."""

    def __init__(
        self, inner: StepSink, say: Say, policy_hint: str | None = None, *, keep_failed: bool
    ) -> None:
        self._inner = inner
        self._say = say
        self._policy_hint = policy_hint
        self._keep_failed = keep_failed
        self.last_failure = ""
        self.hint: str | None = None  # what to do about it, where more is known than the log says
        self._failed = 0
        self._is_well = False  # one episode has come to its end

    async def reserve(self, size_bytes: int) -> Room:
        return await self._inner.reserve(size_bytes)

    async def put_step(self, episode_id: str, number: int, step: Step, room: Room) -> None:
        await self._inner.put_step(episode_id, number, step, room)

    async def discard(self, episode_id: str) -> None:
        await self._inner.discard(episode_id)

    async def finish(self, episode: Episode) -> None:
        if episode.failure is None:
            self._is_well = True
            await self._inner.finish(episode)
            return
        self._failed += 1
        at = f" at step {episode.failure.step}" if episode.failure.step else ""
        self.last_failure = f"{episode.failure.reason}: {episode.failure.message}"
        is_policys = episode.failure.reason is FailureReason.POLICY_ERROR
        self.hint = self._policy_hint if is_policys else None
        self._say(f"episode {episode.id} failed{at}: {self.last_failure}")
        if self._keep_failed:
            await self._inner.finish(episode)
        else:
            await self._inner.discard(episode.id)
        if self._failed == HOPELESS_EPISODES and not self._is_well:
            raise AllFailed(
                f"the first {self._failed} episodes failed; the last: {self.last_failure}",
                self.hint,
            )

    async def close(self) -> None:
        await self._inner.close()


def _refuse_a_total_failure(report: Report, sink: _Chosen) -> None:
    played = report.figures.episodes
    if played and report.figures.finished[EpisodeStatus.FAILED] == played and not report.earlier:
        which = "the only episode" if played == 1 else f"all {played} episodes"
        raise AllFailed(f"{which} failed; the last with {sink.last_failure}", sink.hint)
