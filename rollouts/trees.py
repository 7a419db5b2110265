# SPDX-License-Identifier: Apache-2.0
"""Episodes that branch: one attempt grows a tree, of which each leaf is an episode.

    000042       ●──●──●──●──●──●     the path that begins with the reset
    000042.1           └──●──●──●     parent 000042, branched_at 2: has the steps from 2
    000042.1.1               └──●     parent 000042.1, branched_at 4

A path branches before a step: its session is copied (`SessionPool.branch`), the policy decides anew
in each copy, and the path itself continues. Where, the tree's shape says, or the policy by
`Decision.branch`. A tree is a group: written as a whole, retried as a whole. It is not traced.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, replace
from typing import Any, Self

from .episode_runner import Attempt
from .episodes import Episode
from .policies.policy import Act, Encoded, policy_failed
from .session.branching import Journal
from .session_pool import EpisodeSession

_FORM = "width=4,depth=3"


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a tree: `depth` times, each path becomes `width` paths.

    Attributes:
        every: Steps between two branchings; None: so many that they divide `max_steps` evenly.
    """

    width: int
    depth: int
    every: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `width=4,depth=3`.

        Raises `ValueError`: it has another form.
        """
        try:
            numbers = {
                name: int(number) for name, number in (p.split("=") for p in text.split(","))
            }
            tree = cls(**numbers)
        except (ValueError, TypeError):
            raise ValueError(f"a tree is {_FORM} or {_FORM},every=10, not {text!r}") from None
        if tree.width < 2 or min(numbers.values()) < 1:
            raise ValueError(f"a tree has a width of at least 2 and a depth of at least 1: {_FORM}")
        return tree

    @property
    def leaves(self) -> int:
        """The maximum number of paths."""
        return int(self.width**self.depth)

    def width_at(self, step: int, max_steps: int | None) -> int:
        """Return the number of paths that a path becomes before a step."""
        every = self.every or max(1, (max_steps or 1) // (self.depth + 1))
        return self.width if step % every == 0 and 0 < step // every <= self.depth else 1


def check_tree(text: str, concurrency: int) -> None:
    """Check the value of `--tree`."""
    if (leaves := Tree.parse(text).leaves) > concurrency:
        raise ValueError(f"a tree of {leaves} leaves needs a concurrency of {leaves}, too")


class TreeAttempt(Attempt):
    """An attempt at a tree, or one of its branches."""

    _session: EpisodeSession | None = None  # of a branch, in which it continues

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tree = Tree.parse(self._rules.tree or "")
        self._grown: list[asyncio.Task[Episode]] = []  # the branches of the whole tree
        self._number = 0  # of branches of this path

    async def run(self) -> Episode:
        """Play the tree, and return its first path with the others as `branches`."""
        async with asyncio.TaskGroup() as self._tasks:
            episode = await super().run()
        return replace(episode, branches=tuple(task.result() for task in self._grown))

    async def _play(self) -> None:
        if self._session is None:
            await super()._play()
        else:
            await self._continue(self._session)

    async def _reset(self, session: EpisodeSession) -> None:
        session.journal = Journal()
        await super()._reset(session)

    async def _step(self, session: EpisodeSession, act: Act) -> None:
        width = self._tree.width_at(self._steps, self._rules.max_steps)
        # A branch decides itself, and so does not remember this decision.
        self._before = self._copied_memory() if width > 1 else None
        await super()._step(session, act)

    async def _branch(self, session: EpisodeSession, decided: Encoded) -> None:
        width = self._tree.width_at(self._steps, self._rules.max_steps)
        width = width if decided.branch is None else decided.branch
        width = min(width, self._tree.leaves - len(self._grown))
        if width < 2 or self._steps == self._branched_at:
            return
        seconds = self._rules.step_timeout_seconds
        made = await self._pool.branch(self._address, session, width - 1, seconds=seconds)
        for number, copied in enumerate(made, 1):
            self._number += 1
            branch = copy.copy(self)
            branch.become_branch(number, copied)
            self._grown.append(self._tasks.create_task(Attempt.run(branch)))

    def become_branch(self, number: int, session: EpisodeSession) -> None:
        """Turn a copy of an attempt into a branch of it."""
        self._parent, self._id = self._id, f"{self._id}.{self._number}"
        self._branched_at, self._branch_number, self._number = self._steps, number, 0
        self._session = session
        self._memory = (
            self._copied_memory() if self._before is None else copy.deepcopy(self._before)
        )
        self._odd_rewards, self._size_bytes = self._odd_rewards.copy(), 0
        self._started_at = time.time()
        self._deadline = asyncio.timeout(self._rules.episode_timeout_seconds)

    def _copied_memory(self) -> Any:
        try:
            return copy.deepcopy(self._memory)
        except Exception as exc:
            raise policy_failed(exc) from exc
