# SPDX-License-Identifier: Apache-2.0
"""One attempt at one episode: a reset, then decisions and steps until its end.

    session.reset ─▶ answer ─▶ player.act ─▶ session.step ─▶ answer ─▶ …
                       └────────── Step ◀────────┘ ─▶ sink: no time-out counts this wait

An error of the environment or the policy ends the attempt, and is recorded in the episode.
An error of the sink is raised.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..system.net.access import without_token
from . import episodes
from .answers import Answer
from .buffers import HoldStep
from .errors import EpisodeFailed, PolicyHangs
from .policies.policy import Act, CpuThreads, Encoded, Policy, Turn, at_most, pause, policy_failed
from .session_pool import EpisodeSession, SessionPool

STEPS_OF_AN_ITERATION = 16  # of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of every episode of a rollout. None means no limit.

    Attributes:
        max_steps: Steps after which an episode is truncated.
        step_timeout_seconds: Time limit of a reset or a step.
        policy_timeout_seconds: Time limit of a policy call, without a synchronous call's wait for a
            thread.
        episode_timeout_seconds: Time limit of an episode, without its waits for the sink.
        seed: Seed of the first group of episodes; each further group adds 1.
        reset: Further arguments of every reset.
        tree: The shape of a tree of episodes, such as `width=4,depth=3` (`trees.py`).
    """

    max_steps: int | None = 100
    step_timeout_seconds: float | None = 60.0
    policy_timeout_seconds: float | None = None
    episode_timeout_seconds: float | None = None
    seed: int | None = None
    reset: Mapping[str, Any] | None = None
    tree: str | None = None


class StepTurns:
    """Lets a few coroutines continue in each iteration of the loop, and the others in later ones.

    When the environments of 256 episodes answer at once, an iteration that serves all takes 40 ms.
    Steps that are sent a few at a time are also answered a few at a time.
    """

    def __init__(self, steps: int = STEPS_OF_AN_ITERATION) -> None:
        self._steps = self._left = steps
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def take(self) -> None:
        """Return at once or in a later iteration, in the order of calls."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._renew, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._steps
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_scheduled = self._left < self._steps
        if self._is_scheduled:
            loop.call_soon(self._renew, loop)


@dataclass(frozen=True, slots=True)
class RunContext:
    """State that all attempts of a rollout share."""

    rules: Rules
    group: int  # number of episodes that begin alike
    policy: Policy
    threads: CpuThreads
    pool: SessionPool
    sink: episodes.StepSink
    stats: episodes.ProgressStats
    attempt: Callable[[RunContext, int, str, HoldStep, int], Attempt]  # `Attempt`, or a traced one
    turns: StepTurns = field(default_factory=StepTurns)

    def seed_of(self, number: int) -> int | None:
        """Return the seed of an episode, which is that of its group."""
        return None if self.rules.seed is None else self.rules.seed + number // self.group


class Attempt:
    """One attempt; `run` it once."""

    _parent: str | None = None  # of a branch: see `trees.py`, which sets these three
    _branched_at: int | None = None
    _branch_number = 0

    def __init__(
        self, stage: RunContext, number: int, address: str, hold: HoldStep, attempt: int
    ) -> None:
        """Prepare the attempt number `attempt`, from 1, at the episode with that number."""
        self._attempt = attempt
        self._id = episodes.episode_id(number)
        self._seed = stage.seed_of(number)
        self._address = address
        self._context = stage
        self._rules = stage.rules
        self._pool = stage.pool
        self._hold = hold
        self._deadline = asyncio.timeout(stage.rules.episode_timeout_seconds)
        self._started_at = time.time()
        self._steps = 0
        self._reward = 0.0
        self._odd_rewards: list[str] = []
        self._size_bytes = 0
        self._answer = Answer(b"null", None, done=False)

    async def run(self) -> episodes.Episode:
        """Play the episode and return its outcome; errors of the sink are raised."""
        try:
            async with self._deadline:
                await self._play()
        except TimeoutError as exc:
            _forget_frames(exc)
            late = f"it took more than {self._rules.episode_timeout_seconds:g} s"
            return self._ended(EpisodeFailed(episodes.FailureReason.EPISODE_TIMED_OUT, late))
        except EpisodeFailed as exc:
            _forget_frames(exc)
            return self._ended(exc)
        return self._ended()

    async def _play(self) -> None:
        try:
            self._memory = self._context.policy.memory()
        except Exception as exc:
            raise policy_failed(exc) from exc
        session = await self._reset_somewhere()
        try:
            await self._go_on(session)
        except BaseException:
            self._pool.drop(self._address, session)
            raise
        self._pool.give_back(self._address, session)

    async def _go_on(self, session: EpisodeSession) -> None:
        act = self._context.policy.player(self._context.threads, self._memory)
        while not (self._answer.done or self._steps == self._rules.max_steps):
            await self._step(session, act)

    async def _reset_somewhere(self) -> EpisodeSession:
        fresh = False
        while True:
            await self._context.turns.take()  # a connection costs more than a step
            session, was_used = None, False
            try:
                session, was_used = await self._pool.take(self._address, fresh=fresh)
                await self._reset(session)
                return session
            except BaseException as exc:
                if session is not None:
                    self._pool.drop(self._address, session)
                if not isinstance(exc, EpisodeFailed):
                    raise
                # A server may have closed an idle session, in which this episode has not begun.
                fresh = was_used and exc.reason is episodes.FailureReason.CONNECTION_LOST
                if not (fresh or await self._pool.wait_for(self._address, exc)):
                    raise

    async def _reset(self, session: EpisodeSession) -> None:
        seed = {} if self._seed is None else {"seed": self._seed}
        arguments = {"episode_id": self._id, **seed, **(self._rules.reset or {})}
        self._answer = await session.reset(arguments, seconds=self._rules.step_timeout_seconds)

    async def _step(self, session: EpisodeSession, act: Act) -> None:
        await self._context.turns.take()
        before = self._answer
        branch = self._branch_number if self._steps == self._branched_at else 0
        turn = Turn(self._id, self._steps, self._seed, before.reward, branch)
        decided = await self._decided(act, before, turn)
        await self._branch(session, decided)
        self._answer = after = await self._answered(session, decided)
        info = _info(decided.info_json, after.metadata_json)
        texts = before.observation_json, decided.action_json
        await self._put(episodes.Step(*texts, after.reward, after.done, info, decided.arrays))

    async def _branch(self, session: EpisodeSession, decided: Encoded) -> None:
        """Branch before the step if the policy asks for that."""
        if decided.branch is not None:
            text = "the policy branches, and the rollout has no --tree"
            raise EpisodeFailed(episodes.FailureReason.POLICY_ERROR, text)

    async def _answered(self, session: EpisodeSession, decided: Encoded) -> Answer:
        return await session.step(decided.action_json, seconds=self._rules.step_timeout_seconds)

    async def _decided(self, act: Act, seen: Answer, turn: Turn) -> Encoded:
        seconds = self._rules.policy_timeout_seconds
        try:
            if seconds is None:
                return await act(seen, turn)
            async with at_most(seconds):
                return await act(seen, turn)
        except (EpisodeFailed, PolicyHangs):
            raise
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Raised by the policy's own code. Let through, it would end the slot silently.
            raise policy_failed(exc) from exc
        except (Exception, SystemExit) as exc:  # let through, `sys.exit()` would end the loop
            raise policy_failed(exc) from exc

    async def _put(self, step: episodes.Step) -> None:
        size_bytes = step.size_bytes
        self._hold(size_bytes, len(self._answer.observation_json))
        go_on = pause(self._deadline)  # a slow disk is not the environment's fault
        await self._context.sink.put_step(self._id, self._steps, step)
        if go_on is not None:
            go_on()
        self._steps += 1
        if (odd := self._answer.odd_reward) is not None:
            self._odd_rewards.append(odd)
        self._reward += step.reward or 0.0
        if not self._odd_rewards and not math.isfinite(self._reward):
            self._odd_rewards.append("a sum beyond the greatest number")
        self._size_bytes += size_bytes
        self._context.stats.steps += 1

    def _ended(self, end: EpisodeFailed | None = None) -> episodes.Episode:
        failure = None
        if end is not None:
            failure = episodes.Failure(end.reason, str(end), self._steps, end.traceback)
        last = self._answer.observation_json
        known = episodes.EpisodeStatus
        status = known.DONE if self._answer.done else known.TRUNCATED
        return episodes.Episode(
            id=self._id,
            environment=without_token(self._address)[0],
            seed=self._seed,
            steps=(),
            total_reward=math.nan if self._odd_rewards else self._reward,
            status=status if failure is None else known.FAILED,
            started_at=self._started_at,
            finished_at=time.time(),
            failure=failure,
            final_observation_json=last,
            attempts=self._attempt,
            size_bytes=self._size_bytes + len(last),
            odd_rewards=tuple(self._odd_rewards),
            parent=self._parent,
            branched_at=self._branched_at,
        )


def _forget_frames(exc: BaseException | None) -> None:
    """Drop the tracebacks of an exception and its causes.

    Their frames keep observations in reference cycles until garbage is collected: those of hundreds
    of episodes, if these fail at once.
    """
    while exc is not None and exc.__traceback__ is not None:  # each once, even in a cycle
        exc.__traceback__ = None
        exc = exc.__cause__ or exc.__context__


def _info(said_by_policy: bytes, said_by_environment: bytes) -> bytes:
    """Join the policy's info and the environment's metadata into one JSON object.

    The latter is `metadata`, or `environment_metadata` if the policy uses that name itself.
    """
    if said_by_environment in (b"{}", b"null"):
        return said_by_policy
    if said_by_policy == b"{}":
        return b'{"metadata":%b}' % said_by_environment
    name = "metadata"
    if b'"metadata"' in said_by_policy:  # rare, and parsing may take long
        taken = msgspec.json.decode(said_by_policy, type=dict[str, msgspec.Raw])
        while name in taken:
            name = f"environment_{name}"
    return said_by_policy[:-1] + b',"%b":%b}' % (name.encode(), said_by_environment)
