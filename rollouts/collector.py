# SPDX-License-Identifier: Apache-2.0
"""Runs many episodes at once, with any policy on any OpenEnv servers.

    numbers ─▶ slot 1 … slot N ─▶ ConcurrencyLimit ─▶ Attempt, again after a failure ─▶ sink

A slot plays one episode after the other. Episodes are numbered, and everything about one follows
from its number: id, seed, environment. So a rollout that was interrupted continues with the numbers
that are missing. Only whole episodes are tried again, never a step: it may have had effects.

With `batches`, memory holds running episodes (see `buffers.py`), finished ones that wait, and the
present batch. When the share of waiting ones is full, `finish` waits, and no episode begins.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from ..system.process.loop_lag import EventLoopLagMonitor
from ..system.text.units import MB
from . import session_pool, trees
from .buffers import ByteBudget, ConcurrencyLimit, HoldStep
from .episode_runner import Attempt, Rules, RunContext
from .episodes import Episode, ProgressStats, Step, StepSink
from .errors import RolloutError
from .policies.policy import CallablePolicy, CpuThreads, Policy


class BatchSink:
    """A `StepSink` that passes whole episodes on."""

    def __init__(self, limit_bytes: int) -> None:
        self._budget = ByteBudget(limit_bytes)
        self._running: dict[str, list[Step]] = {}
        self._finished: asyncio.Queue[tuple[Episode, int] | None] = asyncio.Queue()

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Keep the step until the episode has ended."""
        self._running.setdefault(episode_id, []).append(step)

    async def finish(self, episode: Episode) -> None:
        """Add the episode; returns when there is room for it."""
        whole = replace(episode, steps=tuple(self._running.pop(episode.id, ())))
        reserved_bytes = await self._budget.reserve(whole.size_bytes)
        self._finished.put_nowait((whole, reserved_bytes))

    async def discard(self, episode_id: str) -> None:
        """Drop the attempt."""
        self._running.pop(episode_id, None)

    async def close(self) -> None:
        """Announce that no further episode will come."""
        self._finished.put_nowait(None)

    async def next(self) -> Episode | None:
        """Return the next finished episode; None after the last one."""
        if (found := await self._finished.get()) is None:
            return None
        episode, reserved_bytes = found
        self._budget.change(-reserved_bytes)
        return episode


DEFAULT_BUFFER_BYTES = 512 * MB
LAG_WINDOW_SECONDS = 600.0


@dataclass(frozen=True, eq=False, repr=False)
class RolloutCollector(Rules):
    """Collects episodes; only one collection at a time may run.

    Its arguments are these attributes and the `Rules` of episodes. It connects when the collection
    begins.

    Attributes:
        env: The address of an OpenEnv server, or several, which take turns.
        policy: A `Policy`, or a callable that takes an observation and returns an action.
        concurrency: How many episodes run at once.
        retries: Further attempts at an episode that failed, each of the whole episode.
        group: How many consecutive episodes begin alike: with one seed, in one environment.
        buffer_bytes: Memory for running episodes, and as much again for finished ones that
            `batches` has not yielded.
        timing: How long sessions wait for a server.
        followed: Environments of the daemon by their addresses; episodes wait for one as long as
            the daemon restarts it.
        tracer: An OpenTelemetry `Tracer`: each attempt at an episode that its sampler wants is
            a trace, with a link to the span in which episodes are collected.
        stats: Counts of the episodes so far.
        lag: How long the event loop was blocked.

    Raises:
        NoEnvironment: An address is invalid.
        ValueError: There is no address, or a number is below 1.
    """

    env: str | Sequence[str]
    policy: Policy | Callable[..., Any]
    _: KW_ONLY
    concurrency: int = 64
    retries: int = 2
    group: int = 1
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    timing: session_pool.SessionTiming = session_pool.DEFAULT_TIMING
    followed: Mapping[str, session_pool.Followed] | None = None
    tracer: Any = None
    stats: ProgressStats = field(default_factory=ProgressStats, init=False)
    lag: EventLoopLagMonitor = field(
        init=False,
        default_factory=lambda: EventLoopLagMonitor("collector", window_seconds=LAG_WINDOW_SECONDS),
    )

    def __post_init__(self) -> None:
        """Check the arguments."""
        addresses = self._addresses()
        if not addresses or self.concurrency < 1:
            raise ValueError("a rollout needs an environment, and a concurrency of at least 1")
        if self.group < 1:
            raise ValueError(f"a group has at least one episode, not {self.group}")
        if self.tree is not None:
            trees.Tree.parse(self.tree)
        for address in addresses:
            session_pool.environment_url(address)

    def _addresses(self) -> Sequence[str]:
        return (self.env,) if isinstance(self.env, str) else self.env

    async def batches(
        self, size: int, *, episodes: int | None = None
    ) -> AsyncGenerator[list[Episode], None]:
        """Yield batches of `size` episodes in the order in which they end; the last may be smaller.

        It continues until `episodes` were played, or without end. Leaving the loop ends it;
        `aclose()` of the iterator does so at once.
        """
        numbers = itertools.count() if episodes is None else iter(range(episodes))
        sink = BatchSink(self.buffer_bytes)

        async def collect_all() -> None:
            try:
                await self.collect(numbers, sink, keeps_episodes=True)
            finally:
                await sink.close()

        collecting = asyncio.create_task(collect_all(), name="collecting")
        try:
            batch: list[Episode] = []
            while (episode := await sink.next()) is not None:
                batch.append(episode)
                if len(batch) >= size:
                    yield batch
                    batch = []
            if batch:
                yield batch
            await collecting
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])

    async def collect(
        self, numbers: Iterable[int], sink: StepSink, *, keeps_episodes: bool = False
    ) -> None:
        """Play episodes into a sink, which stays open.

        Args:
            numbers: The numbers of the episodes; id, seed and environment follow from them.
            sink: Takes steps and finished episodes.
            keeps_episodes: Whether the sink holds the steps of an episode in memory until it ends.

        Raises `RolloutError`: the sink failed.
        """
        pool = session_pool.SessionPool(
            self.concurrency, timing=self.timing, followed=self.followed
        )
        threads = CpuThreads(on_hung=self.stats.hang)
        policy = self.policy if isinstance(self.policy, Policy) else CallablePolicy(self.policy)
        make_attempt: Any = Attempt
        if self.tree is not None:
            make_attempt = trees.TreeAttempt
        elif self.tracer is not None:
            from .traced_episodes import EpisodeTraces  # imports OpenTelemetry

            make_attempt = EpisodeTraces(self.tracer).attempt
        stats = self.stats
        context = RunContext(self, self.group, policy, threads, pool, sink, stats, make_attempt)
        limit = ConcurrencyLimit(self.buffer_bytes, keeps_episodes=keeps_episodes)
        with self.lag:
            try:
                await self._play_all(iter(numbers), context, limit)
            finally:  # leave no session and no thread
                try:
                    await pool.close()
                finally:
                    await policy.close()

    async def _play_all(
        self, numbers: Iterator[int], context: RunContext, limit: ConcurrencyLimit
    ) -> None:
        async def slot() -> None:
            for number in numbers:
                async with limit.enter() as hold:
                    await self._episode(context, number, hold)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.concurrency):
                    group.create_task(slot(), name=f"slot-{number}")
        except BaseExceptionGroup as exc:
            # The first error: the sink's own precedes the errors that it caused.
            found: BaseException = exc.subgroup(RolloutError) or exc
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            raise found from exc

    async def _episode(self, context: RunContext, number: int, hold: HoldStep) -> None:
        tree = await self._attempts(context, number, hold)
        for episode in tree:
            await context.sink.finish(episode)
        for episode in tree:
            self.stats.end(episode)

    async def _attempts(self, context: RunContext, number: int, hold: HoldStep) -> list[Episode]:
        """Return an episode, or all those of a tree; the one that began it is the last."""
        addresses = self._addresses()
        address = addresses[number // self.group % len(addresses)]
        for attempt in itertools.count(1):
            episode = await context.attempt(context, number, address, hold, attempt).run()
            tree = [*episode.branches, replace(episode, branches=())]
            failure = next((each.failure for each in tree if each.failure is not None), None)
            if failure is None or not failure.reason.is_worth_retrying or attempt > self.retries:
                break
            self.stats.retried[failure.reason.value] += 1
            for each in tree:
                await context.sink.discard(each.id)
        return tree
