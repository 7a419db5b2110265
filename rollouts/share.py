# SPDX-License-Identifier: Apache-2.0
"""A share of a rollout's episodes, played in this process and taken by another.

    take ◀── BatchSink ◀── RolloutCollector ──▶ the addresses that it was told

What has finished waits until it is taken, within half of the rollout's buffer. A share that fails
hands over what has finished first. Where an address does not answer any more, its episodes fail
soon: whoever takes them knows of another.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .batches import BatchSink
from .episodes import Episode
from .policies.named_policy import importable, policy_named
from .run import RunConfig, collector_of
from .sessions.session_pool import SessionTiming

TAKE_SECONDS = 5.0  # of one `take`
GATHER_SECONDS = 0.05  # for each episode after its first
BATCH_BYTES = 8 << 20
TIMING = SessionTiming(reconnect_seconds=3.0)


class Share:
    """Some episodes of a rollout. All methods are called on one loop."""

    def __init__(
        self,
        config: RunConfig,
        addresses: Sequence[str],
        numbers: Sequence[int],
        folder: str | None,
        variables: Mapping[str, str],
    ) -> None:
        """Nothing is played before the first `take`.

        Args:
            config: The rollout.
            addresses: Where its environments answer, for this share.
            numbers: Of the episodes.
            folder: Where the policy's module is looked for.
            variables: The policy's.
        """
        self._config = config
        self._addresses = list(addresses)
        self._numbers = numbers
        self._folder = Path(folder) if folder else None
        self._variables = dict(variables)
        self._sink = BatchSink(config.buffer_bytes // 2)
        self._playing: asyncio.Task[None] | None = None

    async def take(self) -> tuple[list[Episode], bool]:
        """Return episodes that have finished, none where none has yet; and whether that is all.

        It takes `TAKE_SECONDS` at most, however soon one follows another.

        Raises:
            RolloutError: It has failed, and what had finished was taken.
        """
        if self._playing is None:
            self._playing = asyncio.create_task(self._play(), name="playing")
        taken: list[Episode] = []
        size, deadline = 0, time.monotonic() + TAKE_SECONDS
        while size < BATCH_BYTES:
            left = deadline - time.monotonic()
            patience = min(left, GATHER_SECONDS) if taken else left
            try:
                episode = await asyncio.wait_for(self._sink.next(), patience)
            except TimeoutError:
                break
            if episode is None:
                if not taken:
                    await self._playing
                return taken, not taken
            taken.append(episode)
            size += episode.size_bytes
        return taken, False

    async def _play(self) -> None:
        os.environ.update(self._variables)  # this process is the share's
        try:
            with importable(self._folder):
                policy = await policy_named(self._config.policy, self._addresses[0])
                collector = collector_of(self._config, self._addresses, policy, TIMING)
                await collector.collect(self._numbers, self._sink, keeps_episodes=True)
        finally:
            await self._sink.close()
