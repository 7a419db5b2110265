# SPDX-License-Identifier: Apache-2.0
"""Episodes that branch: one attempt grows a tree, of which each leaf is an episode.

    000042       ●──●──●──●──●──●     the path that begins with the reset
    000042.1           └──●──●──●     parent 000042, branched_at 2: has the steps from 2
    000042.1.1               └──●     parent 000042.1, branched_at 4

A path branches before a step: the point is kept (`EpisodeSession.checkpoint`), and the path goes to
its end. Then the session returns to the point, and the policy decides again, once for each branch.
So a tree has one session, and as many trees as episodes are played at once. Where a path branches,
the tree's shape says, or the policy by `Decision.branch`. A tree is a group: written as a whole,
retried as a whole. It is not traced.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, replace
from typing import Any, Self

from .episode_runner import Attempt
from .episodes import Episode
from .policies.policy import Act, Encoded, pause, policy_failed
from .session.branching import Journal
from .session_pool import EpisodeSession

_FORM = "width=4,depth=3"
MAX_LEAVES = 65_536


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a tree: `depth` times, each path becomes `width` paths.

    Attributes:
        every: Steps between two branchings; None: the number that divides `max_steps` evenly.
    """

    width: int
    depth: int
    every: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `width=4,depth=3`; raises `ValueError`."""
        try:
            pairs = (part.split("=") for part in text.split(","))
            numbers = {name: int(number) for name, number in pairs}
            tree = cls(**numbers)
        except (ValueError, TypeError):
            raise ValueError(f"a tree is {_FORM} or {_FORM},every=10, not {text!r}") from None
        if tree.width < 2 or min(numbers.values()) < 1:
            raise ValueError(f"a tree has a width of at least 2 and a depth of at least 1: {_FORM}")
        if tree.leaves > MAX_LEAVES:
            text = f"a tree has at most {MAX_LEAVES} episodes, not {tree.leaves}: {_FORM}"
            raise ValueError(text)
        return tree

    @property
    def leaves(self) -> int:
        """The maximum number of paths."""
        return int(self.width**self.depth)

    def width_at(self, step: int, max_steps: int | None) -> int:
        """Return the number of paths that a path becomes before a step."""
        every = self.every or max(1, (max_steps or 1) // (self.depth + 1))
        return self.width if step % every == 0 and 0 < step // every <= self.depth else 1


class TreeAttempt(Attempt):
    """An attempt at a tree, or one of its branches."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tree = Tree.parse(self._rules.tree or "")
        self._number = 0  # of branches of this path
        # Of the whole tree: its finished branches, and those to be played, the next one last.
        self._grown: list[Episode] = []
        self._pending: list[TreeAttempt] = []

    async def run(self) -> Episode:
        """Play the tree, and return its first path with the others as `branches`."""
        episode = await super().run()
        return episode if self._parent else replace(episode, branches=tuple(self._grown))

    async def _play(self) -> None:
        if self._parent is None:
            await super()._play()
            return
        self._started_at = time.time()
        await self._session.restore(self._point, seconds=self._rules.step_timeout_seconds)
        await self._go_on(self._session)

    async def _go_on(self, session: EpisodeSession) -> None:
        await super()._go_on(session)
        if self._parent is not None:
            return
        pause(self._deadline)  # each branch has a limit of its own
        while self._pending:
            self._grown.append(await self._pending.pop().run())
            if self._grown[-1].failure is not None:  # the tree fails as a whole
                break
        session.abort()  # with the session, the server drops its checkpoints

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
        paths = len(self._grown) + len(self._pending) + (1 if self._parent is None else 2)
        width = min(width, self._tree.leaves - paths + 1)
        if width < 2 or self._steps == self._branched_at:
            return
        self._session = session
        self._point = await session.checkpoint(seconds=self._rules.step_timeout_seconds)
        made = [copy.copy(self) for _ in range(1, width)]
        for number, branch in enumerate(made, 1):
            branch.become_branch(self._number + number, number)
        self._number += len(made)
        self._pending += reversed(made)

    def become_branch(self, number_of_path: int, number: int) -> None:
        """Turn a copy of an attempt into a branch of it."""
        self._parent, self._id = self._id, f"{self._id}.{number_of_path}"
        self._branched_at, self._branch_number, self._number = self._steps, number, 0
        before = self._before
        self._memory = self._copied_memory() if before is None else copy.deepcopy(before)
        self._odd_rewards, self._size_bytes = self._odd_rewards.copy(), 0
        self._deadline = asyncio.timeout(self._rules.episode_timeout_seconds)

    def _copied_memory(self) -> Any:
        try:
            return copy.deepcopy(self._memory)
        except Exception as exc:
            raise policy_failed(exc) from exc
