# SPDX-License-Identifier: Apache-2.0
"""A rollout into a folder, from wherever an earlier one was interrupted.

    rollout.json: the same? ─▶ writer: which episodes exist? ─▶ collector: the others ─▶ close
                                                                     └─▶ stages, if any

Everything about an episode follows from its number, so what is missing can be played at any time.
An episode that failed for good is told, and left out, so that the next rollout into the folder
plays it again; `keep_failed` writes it with what there was of it. For groups see `stages.grouping`.

Half of the buffer is for what running episodes hold, half for what waits to be written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from ..system.loop_lag import LagSnapshot
from ..system.units import MB
from .collector import RolloutCollector
from .episodes import EpisodeStatus, StepSink, episode_id
from .errors import OtherRollout
from .failure_policy import ChosenSink, Say
from .folder.disk import typed
from .folder.layout import JSONL
from .folder.writer import RolloutWriter
from .policies.named_policy import hint_of, policy_named
from .policies.policy import Policy
from .progress_stats import Figures
from .stages.chosen import Functions, Stages
from .stages.grouping import GroupSink
from .tally import Tally

RECORD = "rollout.json"
REPORT_SECONDS = 1.0
DEFAULT_BUFFER_BYTES = 256 * MB


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
    policy_timeout_seconds: float | None = None
    episode_timeout_seconds: float | None = None
    retries: int = 2
    seed: int | None = None
    reset: Mapping[str, Any] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)
    form: str = JSONL
    keep_failed: bool = False
    keep_cached: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    max_loop_lag_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.episodes % self.stages.size:
            raise ValueError(f"{self.episodes} episodes are no groups of {self.stages.size}")

    def record(self) -> dict[str, Any]:
        """What must be the same for a rollout to be continued."""
        return {
            "environments": list(self.environments),
            "policy": self.policy,
            "seed": self.seed,
            "max_steps": self.max_steps,
            "reset": dict(self.reset),
            "format": self.form,
            **self.stages.record(),
        }

    def record_before(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record as it is found: one of an earlier version does not tell of the format, which may
        be any then, nor of stages, of which there were none."""
        return {"format": self.form, **Stages().record(), **record}


@dataclass(frozen=True, slots=True)
class Report:
    """How far it is."""

    wanted: int
    earlier: int  # episodes that were there already
    figures: Figures
    tally: Tally
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
        if filtered := self.tally.filtered.total():
            parts.append(f"{filtered} filtered")
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
            "there": self.earlier + self.tally.written,
            **self.figures.to_json(),
            **self.tally.to_json(),
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
    functions = await asyncio.to_thread(order.stages.functions)
    await asyncio.to_thread(claim_folder, order)
    collector = _collector(order, addresses, policy)
    tally = Tally()

    def report() -> Report:
        return Report(order.episodes, earlier, collector.figures, tally, collector.lag.snapshot())

    async with _writer(order) as writer:
        numbers = missing(order.episodes, writer.finished_episode_ids())
        refuse_torn_groups(order, numbers)
        earlier = order.episodes - len(numbers)
        if earlier:
            say(f"{earlier} of {order.episodes} episodes are there already")
        async with _staged(functions, writer, tally) as staged:
            keeps_failed = order.keep_failed or order.stages.takes_failed
            hint = hint_of(order.policy)
            sink = ChosenSink(staged, tally, say, hint, keeps_failed=keeps_failed)
            async with _reporting(report, on_report):
                await collector.collect(numbers, sink)
    sink.refuse_a_total_failure(collector.figures, earlier)
    return {**report().to_json(), "out": str(order.folder), "kept_failed": keeps_failed}


def _collector(order: Order, addresses: list[str], policy: Policy) -> RolloutCollector:
    return RolloutCollector(
        addresses,
        policy,
        concurrency=min(order.concurrency, order.episodes),
        max_steps=order.max_steps,
        step_timeout_seconds=order.step_timeout_seconds,
        policy_timeout_seconds=order.policy_timeout_seconds,
        episode_timeout_seconds=order.episode_timeout_seconds,
        retries=order.retries,
        seed=order.seed,
        reset=order.reset,
        group=order.stages.size,
        buffer_bytes=order.buffer_bytes // 2,
        max_loop_lag_seconds=order.max_loop_lag_seconds,
    )


def missing(episodes: int, existing: frozenset[str]) -> list[int]:
    """The numbers of the episodes that are not there yet."""
    return [number for number in range(episodes) if episode_id(number) not in existing]


def refuse_torn_groups(order: Order, numbers: list[int]) -> None:
    """What we write is whole groups, so these are the numbers of some.

    Raises:
        OtherRollout: somebody else has written to the folder.
    """
    size = order.stages.size
    lacking = Counter(number // size for number in numbers)
    for group in (group for group, count in lacking.items() if count < size):
        first, last = episode_id(group * size), episode_id(group * size + size - 1)
        raise OtherRollout(
            f"{order.folder} has only some of the episodes {first} to {last}, which are a group",
            "write to another folder: advantages are told of whole groups",
        )


def claim_folder(order: Order) -> None:
    """Make the folder this rollout's.

    Raises:
        OtherRollout: it is another one's.
        OutputUnwritable, OutputFull
    """
    path, now = order.folder / RECORD, order.record()
    with typed(path):
        order.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            found = orjson.loads(path.read_bytes())
            before = order.record_before(found)
            differing = [key for key, value in now.items() if before.get(key) != value]
            if differing:
                raise _other_rollout(order.folder, differing[0], before, now)
            if found.keys() >= now.keys():
                return
        partial = path.with_suffix(".partial")
        partial.write_bytes(orjson.dumps(now, option=orjson.OPT_INDENT_2))
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
        order.folder,
        buffer_bytes=order.buffer_bytes // 2,
        form=order.form,
        keep_cached=order.keep_cached,
    )
    try:
        yield writer
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            await asyncio.shield(writer.close())
        raise
    await writer.close()


@asynccontextmanager
async def _staged(
    functions: Functions | None, writer: RolloutWriter, tally: Tally
) -> AsyncIterator[StepSink]:
    """The stages before the writer, if any. Of a group that is not complete at the end, nothing is
    written."""
    if functions is None:
        yield writer
        return
    sink = GroupSink(
        writer,
        functions.size,
        filters=functions.filters,
        advantages=functions.advantages,
        tally=tally,
    )
    try:
        yield sink
    finally:
        await asyncio.to_thread(sink.stop)


@asynccontextmanager
async def _reporting(
    report: Callable[[], Report], on_report: Callable[[Report], None]
) -> AsyncIterator[None]:
    async def each_second() -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await asyncio.to_thread(on_report, report())

    reporting = asyncio.create_task(each_second(), name="reporting")
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.wait([reporting])
