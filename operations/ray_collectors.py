# SPDX-License-Identifier: Apache-2.0
"""`RayCollectors`: a rollout's episodes, played by collectors on the nodes of a Ray cluster.

    worker: RayCollectors ──▶ driver process ──▶ actor on a replica's node ──▶ that replica
       │  ◀── episodes, as they finish ──────────┘ `rollouts/share.py`
       └──▶ sink ──▶ the one folder

Each collector has a share of the numbers, is placed beside a replica, and plays at that replica's
own address. The worker takes what has finished, and writes it: a folder has one writer. An episode
is a collector's until the worker has it, so none is written twice, whatever is lost.

Failure cases

    a collector or its node is lost     what the worker does not have of its share is another
                                        one's, beside another replica
    its replica is lost                 an episode that fails of that is played again, as often as
                                        `retries` says, with all that is left: by another collector,
                                        at another replica, or at the next of the same
    its replicas are on other nodes     the rollout ends with an error, unless Ray has started them
    they are on several clusters        the rollout is refused before it plays
    no replica is ready                 waited for, as long as the environment is to come back
    the cluster does not answer         the rollout ends with an error; what has finished is kept
    the worker is killed                its driver ends, and with it its actors; the request's next
                                        attempt plays what the folder does not have
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from ..environments.engine_address import EngineAddress
from ..environments.engines.base import EngineError
from ..environments.engines.ray_driver import RayDriver
from ..environments.following import FollowedEnvironment
from ..rollouts.collector import LAG_WINDOW_SECONDS, first_of
from ..rollouts.episodes import Episode, FailureReason, StepSink
from ..rollouts.errors import RolloutError
from ..rollouts.progress_stats import ProgressStats
from ..rollouts.run import RunConfig
from ..system.access_tokens import without_token
from ..system.backoff import backoff_seconds
from ..system.loop_lag import EventLoopLagMonitor
from ..system.request_origin import is_loopback

LOOK_SECONDS = 0.2  # between two looks for a replica that is ready
MOST_LOSSES = 12  # of one share's collectors, without an episode between them
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0  # between these
RAY = "ray"
_ADDRESS = "RAY_ADDRESS"
_AS_ITS_REPLICA = (FailureReason.NOT_CONNECTED, FailureReason.CONNECTION_LOST)


class RayCollectors:
    """Plays episodes as a `RolloutCollector` does, on the nodes of a Ray cluster."""

    def __init__(
        self,
        config: RunConfig,
        *,
        count: int,
        policy_folder: str | None,
        variables: Mapping[str, str],
        environ: Mapping[str, str],
    ) -> None:
        """Nothing is connected before episodes are collected.

        Args:
            config: The rollout.
            count: How many collectors there are to be.
            policy_folder: Where the policy's module is looked for, on each node.
            variables: The policy's.
            environ: The driver's variables, which lead to the cluster.
        """
        self._config = config
        self._urls = list(config.environments.values())
        found = (config.followed.get(url) for url in self._urls)
        self._followed = [each if isinstance(each, FollowedEnvironment) else None for each in found]
        self._count = min(count, config.episodes)
        concurrency = ceil(config.concurrency / self._count)
        self._told = {
            "config": replace(config, concurrency=concurrency, followed={}),
            "folder": policy_folder,
            "variables": dict(variables),
        }
        self._driver = RayDriver(environ, f"{__package__}.ray_collector_driver")
        self._replays: Counter[str] = Counter()  # by episode
        self.stats = ProgressStats()
        self.lag = EventLoopLagMonitor("collectors", window_seconds=LAG_WINDOW_SECONDS)

    async def collect(self, numbers: Iterable[int], sink: StepSink) -> None:
        """Play episodes into a sink, which is not closed.

        Raises:
            RolloutError: The sink's, or a collector's; or the cluster does not answer, or has not
                the nodes that an environment's replicas are on.
            NotAnswering: An environment was taken down, or given up.
        """
        shares = shares_of(list(numbers), self._count, self._config.stages.size)
        with self.lag:
            try:
                async with asyncio.TaskGroup() as group:
                    for index, share in enumerate(shares):
                        group.create_task(self._play(index, share, sink), name=f"share-{index}")
            except BaseExceptionGroup as exc:
                raise first_of(exc) from exc
            finally:
                await asyncio.to_thread(self._driver.close)

    async def _play(self, index: int, share: list[int], sink: StepSink) -> None:
        """Have one share played, by one collector after the other until all of it is there."""
        left, losses, lost = set(share), 0, None
        while left:
            addresses = await self._addresses(index, lost)
            before, end = len(left), await self._play_at(addresses, left, sink)
            lost = addresses[0]
            losses = 0 if len(left) < before else losses + 1
            if losses == MOST_LOSSES:
                text = f"{losses} collectors ended one after another; the last: {end}"
                raise RolloutError(text, "see what its node says: ray status, openenv status")
            if left:
                await asyncio.sleep(
                    backoff_seconds(
                        losses + 1, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS
                    )
                )

    async def _play_at(self, addresses: list[str], left: set[int], sink: StepSink) -> str:
        """Have one collector play what is left, as long as it and its replica last; its end."""
        share = {**self._told, "addresses": addresses, "numbers": sorted(left)}
        collector = await self._ask("begin", pickle.dumps(share), addresses[0])
        end = None
        while end is None:
            episodes, end = await self._ask("take", collector)
            kept = [each for each in episodes if not self._is_to_be_replayed(each)]
            await asyncio.gather(*(self._keep(each, sink) for each in kept))
            left -= {int(each.id) for each in kept}
            if len(kept) < len(episodes):
                end = f"nothing answers at {urlsplit(addresses[0]).netloc}"
        await self._ask("end", collector)
        return str(end)

    def _is_to_be_replayed(self, episode: Episode) -> bool:
        """Whether an episode failed with its replica, and may go better at another."""
        if episode.failure is None or episode.failure.reason not in _AS_ITS_REPLICA:
            return False
        self._replays[episode.id] += 1
        if self._replays[episode.id] > self._config.retries:
            return False
        self.stats.retry(episode)
        return True

    async def _keep(self, episode: Episode, sink: StepSink) -> None:
        for number, step in enumerate(episode.steps):
            await sink.put_step(episode.id, number, step, await sink.reserve(step.size_bytes))
            self.stats.step(step.size_bytes)
        url = self._urls[int(episode.id) // self._config.stages.size % len(self._urls)]
        await sink.finish(replace(episode, steps=(), environment=without_token(url)[0]))
        self.stats.end(episode)

    async def _addresses(self, index: int, lost: str | None) -> list[str]:
        """Return where a collector is to play: a replica of each environment, on a living node.

        Args:
            index: The share's: they take turns.
            lost: A replica that has just failed, which another is preferred to.
        """
        while True:
            living = {node["address"] for node in await self._ask("nodes")}
            found = [
                url
                if each is None
                else await asyncio.to_thread(address_on, living, each, index, lost)
                for url, each in zip(self._urls, self._followed, strict=True)
            ]
            if None not in found:
                return [address for address in found if address is not None]
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(self._driver.call, function, *arguments)
        except EngineError as exc:
            raise RolloutError(exc.message, exc.hint) from exc


def cluster_of(environments: Iterable[FollowedEnvironment]) -> EngineAddress | None:
    """Return the Ray cluster that environments were launched on; None: none is on Ray.

    Raises:
        RolloutError: They are on several: a collector plays at replicas of its own cluster's nodes.
    """
    on_ray = {each.name: each.engine for each in environments if each.engine.engine == RAY}
    clusters = list(dict.fromkeys(on_ray.values()))
    if len(clusters) > 1:
        told = "; ".join(f"{name} on {dict(at.variables)[_ADDRESS]}" for name, at in on_ray.items())
        raise RolloutError(
            f"the environments are on different Ray clusters: {told}",
            "roll out those of one cluster at a time; or launch all with the same RAY_ADDRESS",
        )
    return clusters[0] if clusters else None


def shares_of(numbers: Sequence[int], count: int, group: int) -> list[list[int]]:
    """Divide episodes evenly; those of a group stay together."""
    groups = list(dict.fromkeys(number // group for number in numbers))
    turns = {each: turn % count for turn, each in enumerate(groups)}
    shares = [[n for n in numbers if turns[n // group] == turn] for turn in range(count)]
    return [share for share in shares if share]


def address_on(
    living: set[str], environment: FollowedEnvironment, index: int, lost: str | None
) -> str | None:
    """Choose where a share is played of what is ready; None: nothing is yet.

    Args:
        living: The addresses of the nodes.
        environment: Whose replica it is to be.
        index: The share's.
        lost: The replica that others are preferred to.

    Raises:
        RolloutError: The replicas are on other nodes.
    """
    anywhere = environment.replica_addresses()
    ready = [
        each
        for each in anywhere
        if (host := urlsplit(each).hostname or "") in living or is_loopback(host)
    ]
    if anywhere and not ready and environment.engine.engine != RAY:
        raise RolloutError(
            f"the replicas of {environment.name} are on no node of the Ray cluster",
            "launch it with --provider ray, too; or roll out without --provider ray",
        )
    others = [each for each in ready if each != lost] or ready
    return others[index % len(others)] if others else None
