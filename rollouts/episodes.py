# SPDX-License-Identifier: Apache-2.0
"""Steps and episodes, the interface of sinks that take them, and the counts of a rollout.

    collector ──Step──▶ StepSink     a step's memory is free once it is on disk

A step has the observation that the policy saw, its action, and the reward and `done` that followed.
The observation after the last action is the episode's `final_observation`.

Observations and actions stay the JSON texts that were received. A parsed tree of numbers takes ten
times the memory of its text, and would only be written as the same text again. So `size_bytes` is
what an episode really holds, and writing joins bytes. `step.observation` parses the text each time.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import orjson

if TYPE_CHECKING:
    import numpy as np

EMPTY_OBJECT = b"{}"
STEP_OVERHEAD_BYTES = 512  # of the objects around a step's texts; measured: 430
BytesLike = bytes | bytearray | memoryview
_decode = msgspec.json.Decoder().decode


def parse(text: BytesLike | str) -> Any:
    """Parse a JSON text, which may be large: an observation, or a row that contains one.

    For a megabyte, msgspec takes 0.6 ms and orjson up to 6, both with the interpreter lock: orjson
    maps twelve times the text's length each time. The standard library, like the environment's own
    server, also reads what msgspec refuses (half a surrogate pair, `NaN`).

    Raises:
        ValueError: The text is not JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _decode(text)
    except ValueError:
        return json.loads(bytes(text) if isinstance(text, memoryview) else text)


@dataclass(frozen=True, slots=True)
class Array:
    """A large array beside a step's JSON: an image, routed experts, logits.

    `data` is C-contiguous; `dtype` is numpy's name of the type (`uint8`, `<f4`).
    """

    data: BytesLike
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of the data."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a numpy array on the same memory, read-only if the data is."""
        import numpy as np  # an optional dependency

        found: np.ndarray[Any, Any] = np.ndarray(self.shape, self.dtype, self.data)
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an episode, with its values as JSON texts."""

    observation_json: bytes  # what the policy saw
    action_json: bytes
    reward: float | None
    done: bool
    info_json: bytes = EMPTY_OBJECT  # further data of the policy and the environment
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        observation: Any,
        action: Any,
        reward: float | None,
        done: bool,
        info: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> Self:
        """Make a step from values instead of JSON texts."""
        texts = orjson.dumps(observation), orjson.dumps(action)
        return cls(*texts, reward, done, orjson.dumps(dict(info or {})), arrays or {})

    @property
    def observation(self) -> Any:
        """The observation that the policy saw; parsed each time."""
        return parse(self.observation_json)

    @property
    def action(self) -> Any:
        """The action of the policy; parsed each time."""
        return parse(self.action_json)

    @property
    def info(self) -> dict[str, Any]:
        """Return the policy's info and the environment's metadata; parsed each time."""
        return dict(parse(self.info_json))

    @property
    def size_bytes(self) -> int:
        """The bytes that the step holds in memory."""
        texts = len(self.observation_json) + len(self.action_json) + len(self.info_json)
        return texts + sum(array.size_bytes for array in self.arrays.values()) + STEP_OVERHEAD_BYTES


class EpisodeStatus(StrEnum):
    """The way in which an episode ended."""

    DONE = "done"  # the environment said so
    TRUNCATED = "truncated"  # it reached the maximum number of steps
    FAILED = "failed"  # `failure` has the cause; the steps until then are kept


class FailureReason(StrEnum):
    """The cause of a failed episode. `is_worth_retrying` says whether another attempt may help."""

    NOT_CONNECTED = "not_connected"  # nothing answers at the address
    NO_CAPACITY = "no_capacity"  # the server has no room for another session
    CONNECTION_LOST = "connection_lost"  # in the middle of the episode
    STEP_TIMED_OUT = "step_timed_out"  # a reset or a step took too long
    EPISODE_TIMED_OUT = "episode_timed_out"
    ENVIRONMENT_ERROR = "environment_error"  # the environment raised
    INVALID_ACTION = "invalid_action"  # the environment refused the action's form
    PROTOCOL_ERROR = "protocol_error"  # an answer that is not OpenEnv's
    BRANCH_FAILED = "branch_failed"  # the session could not be copied
    POLICY_TIMED_OUT = "policy_timed_out"  # one call of the policy took too long
    POLICY_ERROR = "policy_error"  # the policy raised, or its result is not JSON

    @property
    def is_worth_retrying(self) -> bool:
        """Return whether another attempt at the whole episode may succeed."""
        return self not in _LASTING


_LASTING = (FailureReason.INVALID_ACTION, FailureReason.PROTOCOL_ERROR, FailureReason.BRANCH_FAILED)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an episode, and its step (the reset is step 0)."""

    reason: FailureReason
    message: str
    step: int | None = None
    traceback: str = ""  # of a policy that raised; for the log, and not written


@dataclass(frozen=True, slots=True)
class Episode:
    """One whole episode, which is the last of its attempts."""

    id: str  # the same after a restart: see `episode_id`
    environment: str  # the address of its server
    seed: int | None
    steps: tuple[Step, ...]
    total_reward: float  # NaN if a reward was not a number
    status: EpisodeStatus
    started_at: float  # seconds since the epoch
    finished_at: float
    failure: Failure | None = None
    final_observation_json: bytes = b"null"
    attempts: int = 1
    size_bytes: int = 0  # of its steps and its final observation, in memory
    odd_rewards: tuple[str, ...] = ()  # rewards that were not finite numbers
    parent: str | None = None  # of a branch: the episode that has the steps before `branched_at`
    branched_at: int | None = None  # the number of its own first step
    branches: tuple[Episode, ...] = ()  # the other episodes of its tree, if it began the tree

    @property
    def final_observation(self) -> Any:
        """The observation after the last action; parsed each time."""
        return parse(self.final_observation_json)


def episode_id(number: int) -> str:
    """The id of the episode with that number, from 0: `000042`."""
    return f"{number:06d}"


def number_of(episode_id: str) -> int:
    """The number of an episode, or of the tree to which it belongs: 42 of `000042.1`."""
    return int(episode_id.partition(".")[0])


class StepSink(Protocol):
    """Takes steps one by one, so that no episode has to be in memory as a whole.

    For each id, the calls are `put_step` with 0, 1, 2, …, and then `finish` or `discard`; after a
    `discard`, the next attempt begins with 0 again. The steps of a branch begin with `branched_at`.
    """

    async def put_step(self, episode_id: str, number: int, step: Step) -> None:
        """Take a step; waits if the sink is slow."""
        ...

    async def finish(self, episode: Episode) -> None:
        """Finish an episode; its `steps` are empty, because `put_step` took them."""
        ...

    async def discard(self, episode_id: str) -> None:
        """Drop the steps of a failed attempt that is followed by another one."""
        ...


_COUNTS = (
    *("steps", "retried", "failures", "last_failures", "hung_calls", "odd_rewards"),
    *("episodes_with_odd_rewards", "written", "left_out", "filtered"),
)


class ProgressStats:
    """Counts of a rollout; only the loop's thread changes them."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.branches = 0  # ended episodes that another one of their tree is counted for
        self.steps = 0
        self.hung_calls = 0
        self.finished: Counter[EpisodeStatus] = Counter()
        self.failures: Counter[str] = Counter()  # by reason, of episodes
        self.retried: Counter[str] = Counter()  # by reason, of failed attempts before the last
        self.odd_rewards: Counter[str] = Counter()  # rewards that are not numbers, by their text
        self.episodes_with_odd_rewards = 0
        self._numbers: Counter[EpisodeStatus] = Counter()  # episodes whose reward is a number
        self._means: defaultdict[EpisodeStatus, float] = defaultdict(float)
        self.is_replay = False  # lost episodes, which were counted already, are played again
        # Trees, including those that a filter dropped, and failed ones that are kept.
        self.written = 0
        self.left_out = 0  # episodes that succeeded, but not all of their group
        self.filtered: Counter[str] = Counter()  # episodes, by the filter that dropped them
        self.last_failures: dict[str, str] = {}  # messages, by reason

    def end(self, episode: Episode) -> None:
        """Count an episode that has ended for good."""
        if self.is_replay and episode.failure is None:
            return
        self.branches += episode.parent is not None
        self.finished[episode.status] += 1
        self.odd_rewards.update(episode.odd_rewards)
        if episode.failure is not None:
            self.failures[episode.failure.reason.value] += 1
        elif episode.odd_rewards:
            self.episodes_with_odd_rewards += 1
        else:
            self._numbers[episode.status] += 1
            count, mean = self._numbers[episode.status], self._means[episode.status]
            # Quotients are subtracted, since the sum of the greatest numbers is not finite.
            self._means[episode.status] += episode.total_reward / count - mean / count

    def hang(self) -> None:
        """Count a call of a synchronous policy that was abandoned with its thread."""
        self.hung_calls += 1

    @property
    def episodes(self) -> int:
        """The number of episodes that have ended, including failed ones."""
        return self.finished.total()

    @property
    def trees(self) -> int:
        """The number of trees that have ended; an episode without branches counts as a tree."""
        return self.episodes - self.branches

    def mean_reward(self, status: EpisodeStatus) -> float | None:
        """Return the mean reward of episodes with this status and a numeric reward."""
        return self._means.get(status)

    @property
    def seconds(self) -> float:
        """The seconds since the beginning."""
        return time.monotonic() - self._began_at

    @property
    def steps_per_second(self) -> float:
        """The mean rate since the beginning."""
        return self.steps / seconds if (seconds := self.seconds) > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts of the whole time as plain JSON."""
        return {
            "episodes": self.episodes,
            **{status.value: self.finished[status] for status in EpisodeStatus},
            **{name: copy(getattr(self, name)) for name in _COUNTS},  # for another thread
            "retries": self.retried.total(),
            "mean_reward": self.mean_reward(EpisodeStatus.DONE),
            "truncated_mean_reward": self.mean_reward(EpisodeStatus.TRUNCATED),
            "seconds": self.seconds,
            "steps_per_second": self.steps_per_second,
        }
