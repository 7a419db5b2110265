# SPDX-License-Identifier: Apache-2.0
"""The collector against real env hosts: what comes back, is tried again, and is left behind."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest

import openenvd.rollouts as rollouts
from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episodes import Array, Episode, EpisodeStatus, FailureReason
from openenvd.rollouts.errors import NoEnvironment
from openenvd.rollouts.policies.policy import Decision, Turn
from openenvd.rollouts.session_pool import SessionTiming
from openenvd.schema.protocol import ENVIRONMENT_HEADER, GENERATION_HEADER

from .conftest import Serve, address_of, lines_of
from .relay import Relay


def go(observation: dict[str, Any]) -> dict[str, Any]:
    return {"what": "go"}


async def collect(collector: RolloutCollector, episodes: int) -> list[Episode]:
    async with contextlib.aclosing(collector.batches(episodes, episodes=episodes)) as batches:
        async for batch in batches:
            return sorted(batch, key=lambda episode: episode.id)
    return []


async def test_each_episode_comes_back_once_in_batches_of_a_size(serve: Serve) -> None:
    collector = RolloutCollector(address_of(serve()), go, concurrency=8, seed=100)
    episodes = await collect(collector, 20)
    assert [e.id for e in episodes] == [f"{n:06d}" for n in range(20)]
    for number, episode in enumerate(episodes):
        assert episode.status is EpisodeStatus.DONE
        assert episode.seed == 100 + number
        assert [step.reward for step in episode.steps] == [1, 2, 3, 4, 5]
        assert episode.total_reward == 15
        assert [step.observation["step"] for step in episode.steps] == [0, 1, 2, 3, 4]
        assert episode.steps[0].observation["episode"] == episode.id
        assert episode.steps[0].observation["seed"] == 100 + number
        assert [step.done for step in episode.steps] == [False] * 4 + [True]
        assert episode.final_observation["step"] == 5
        assert episode.size_bytes == sum(s.size_bytes for s in episode.steps) + len(
            episode.final_observation_json
        )
    collector = RolloutCollector(address_of(serve()), go, concurrency=4)
    sizes = [len(batch) async for batch in collector.batches(4, episodes=10)]
    assert sizes == [4, 4, 2]


async def test_an_endless_collection_ends_when_the_caller_leaves_it(serve: Serve) -> None:
    host = serve()
    collector = RolloutCollector(address_of(host), go, concurrency=4)
    async with contextlib.aclosing(collector.batches(3)) as batches:
        async for batch in batches:
            assert len(batch) == 3
            break
    await asyncio.to_thread(host.note_that, sessions=0)


async def test_an_async_policy_and_a_turn(serve: Serve) -> None:
    turns: list[Turn] = []

    async def policy(observation: dict[str, Any], turn: Turn) -> Decision:
        turns.append(turn)
        array = Array(b"\x01\x02", "uint8", (2,))
        return Decision({"what": "go"}, {"logprob": -0.5}, {"experts": array})

    (episode,) = await collect(RolloutCollector(address_of(serve()), policy, seed=7), 1)
    assert [turn.number for turn in turns] == [0, 1, 2, 3, 4]
    assert [turn.reward for turn in turns] == [None, 1, 2, 3, 4]
    assert {turn.seed for turn in turns} == {7}
    assert episode.steps[0].info == {"logprob": -0.5}
    assert episode.steps[0].arrays["experts"].data == b"\x01\x02"


async def test_each_episode_gets_an_instance_of_a_policy_class(serve: Serve) -> None:
    class Counting:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, observation: dict[str, Any]) -> Decision:
            self.seen += 1
            return Decision({"what": "go"}, {"seen": self.seen})

    for episode in await collect(RolloutCollector(address_of(serve()), Counting), 6):
        assert [step.info["seen"] for step in episode.steps] == [1, 2, 3, 4, 5]


async def test_environments_take_turns_and_sessions_serve_to_max_steps(serve: Serve) -> None:
    addresses = [address_of(serve()), address_of(serve())]
    episodes = await collect(RolloutCollector(addresses, go, concurrency=3), 10)
    assert [episode.environment for episode in episodes] == addresses * 5
    host = serve()
    await collect(RolloutCollector(address_of(host), go, concurrency=2), 12)
    assert len(lines_of(host, "instances.log")) <= 3  # one more is made to read the schema
    assert len(lines_of(host, "resets.log")) == 12
    (episode,) = await collect(RolloutCollector(address_of(serve("Endless")), go, max_steps=3), 1)
    assert (episode.status, len(episode.steps)) == (EpisodeStatus.TRUNCATED, 3)


def raising(exception: BaseException) -> Any:
    raise exception


class Broken:
    """A policy that cannot be made."""

    def __init__(self) -> None:
        raise OSError("no weights")


async def leave(_: Any) -> Any:
    sys.exit(3)


async def cancelled(_: Any) -> Any:
    raise asyncio.CancelledError


ENVIRONMENT_ERROR, POLICY_ERROR = FailureReason.ENVIRONMENT_ERROR, FailureReason.POLICY_ERROR
NOT_CONTIGUOUS = Array(memoryview(b"abcdef")[::2], "uint8", (3,))
FAILING: dict[str, tuple[Any, dict[str, Any], FailureReason, str]] = {
    "a step raises": (
        lambda seen: {"what": "raise" if seen["step"] == 2 else "go"},
        {}, ENVIRONMENT_ERROR, "the floor is missing",
    ),
    "an action is refused, which is not tried again": (
        lambda _: {"what": {"not": "a text"}}, {"retries": 1}, FailureReason.INVALID_ACTION, "",
    ),
    "a step hangs": (
        lambda _: {"what": "hang"}, {"step_timeout_seconds": 0.1}, FailureReason.STEP_TIMED_OUT, "",
    ),
    "an episode takes too long": (
        go, {"max_steps": None, "episode_timeout_seconds": 0.2},
        FailureReason.EPISODE_TIMED_OUT, "",
    ),
    "a policy raises": (lambda _: raising(KeyError("nothing")), {}, POLICY_ERROR, "nothing"),
    "a policy runs out": (lambda _: next(iter(())), {}, POLICY_ERROR, ""),
    "a policy is cancelled": (cancelled, {}, POLICY_ERROR, ""),
    "a policy exits": (lambda _: sys.exit(3), {}, POLICY_ERROR, "SystemExit"),
    "a coroutine exits": (leave, {}, POLICY_ERROR, "SystemExit"),
    "no JSON": (lambda _: {1, 2}, {}, POLICY_ERROR, ""),
    "no array": (
        lambda _: Decision({"what": "go"}, {}, {"logits": [1.0]}),  # type: ignore[dict-item]
        {}, POLICY_ERROR, "",
    ),
    "not contiguous": (
        lambda _: Decision({"what": "go"}, {}, {"logits": NOT_CONTIGUOUS}), {}, POLICY_ERROR, "",
    ),
    "a class raises": (Broken, {}, POLICY_ERROR, "no weights"),
}  # fmt: skip


@pytest.mark.parametrize("how", FAILING)
async def test_an_episode_that_fails_says_why_and_keeps_earlier_steps(
    serve: Serve, how: str
) -> None:
    """A StopIteration hung, a CancelledError lost the episode without a word, and what was no array
    ended the rollout."""
    policy, options, reason, words = FAILING[how]
    address = address_of(serve("Endless"))
    async with asyncio.timeout(30):
        episodes = await collect(RolloutCollector(address, policy, **{"retries": 0, **options}), 3)
    assert len(episodes) == 3
    for episode in episodes:
        assert (episode.status, episode.attempts) == (EpisodeStatus.FAILED, 1)
        assert episode.failure is not None
        assert (episode.failure.reason, episode.failure.step) == (reason, len(episode.steps))
        assert words in episode.failure.message
        assert len(episode.steps) == 2 or how != "a step raises"


async def test_an_episode_is_tried_again_as_a_whole_and_counted(serve: Serve) -> None:
    host = serve()

    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        return {"what": "raise_once" if observation["step"] == 3 else "go"}

    collector = RolloutCollector(address_of(host), policy, retries=1)
    (episode,) = await collect(collector, 1)
    assert (episode.status, episode.attempts) == (EpisodeStatus.DONE, 2)
    assert [step.reward for step in episode.steps] == [1, 2, 3, 4, 5]
    assert lines_of(host, "steps.log") == [f"000000 {n}" for n in (1, 2, 3, 4, 1, 2, 3, 4, 5)]
    assert collector.stats.retried.total() == 1
    assert collector.stats.to_json()["retried"] == {"environment_error": 1}


async def test_a_server_that_restarts_is_waited_for(serve: Serve) -> None:
    """Without a pause, the episodes would use up their attempts before the server is back."""
    async with Relay(serve().port) as relay:

        async def policy(observation: dict[str, Any], turn: Turn) -> dict[str, Any]:
            if turn.episode_id == "000004" and turn.number == 2 and relay.falls == 0:
                relay.fall(back_after_seconds=0.3)
            return {"what": "go"}

        collector = RolloutCollector(
            relay.address,
            policy,
            concurrency=3,
            retries=1,
            timing=SessionTiming(pause_seconds=0.02),
        )
        episodes = await collect(collector, 20)
    assert {episode.status for episode in episodes} == {EpisodeStatus.DONE}
    assert 1 <= collector.stats.retried.total() <= 3


def said_by(name: str, launch: str = "1") -> dict[str, dict[str, str]]:
    return {"headers": {ENVIRONMENT_HEADER: name, GENERATION_HEADER: launch}}


@pytest.mark.parametrize("another", [said_by("impostor"), said_by("trained", "2"), {}])
async def test_another_environment_at_the_address_is_taken_for_nobody(
    serve: Serve, another: dict[str, Any]
) -> None:
    """Its episodes would be recorded as the lost one's."""
    host, impostor = serve(**said_by("trained")), serve(**another)
    async with Relay(host.port) as relay:

        async def policy(observation: dict[str, Any], turn: Turn) -> dict[str, Any]:
            if turn.episode_id == "000004" and turn.number == 2:
                relay.fall(back_after_seconds=0.01, to=impostor.port)
            return {"what": "go"}

        collector = RolloutCollector(
            relay.address,
            policy,
            concurrency=1,
            retries=0,
            timing=SessionTiming(pause_seconds=0.02, reconnect_seconds=0.2),
        )
        episodes = await collect(collector, 8)
    statuses = [episode.status for episode in episodes]
    assert statuses == [EpisodeStatus.DONE] * 4 + [EpisodeStatus.FAILED] * 4
    failure = episodes[-1].failure
    assert failure is not None
    assert "is another's" in failure.message
    assert "not trained (1)" in failure.message


async def test_the_environment_is_waited_for_while_another_has_its_address(serve: Serve) -> None:
    host, impostor = serve(**said_by("trained")), serve(**said_by("impostor"))
    async with Relay(host.port) as relay:

        async def policy(observation: dict[str, Any], turn: Turn) -> dict[str, Any]:
            if turn.episode_id == "000002" and relay.falls == 0:
                relay.fall(back_after_seconds=0.01, to=impostor.port)
                asyncio.get_running_loop().call_later(
                    0.3, lambda: relay.fall(back_after_seconds=0.01, to=host.port)
                )
            return {"what": "go"}

        collector = RolloutCollector(
            relay.address,
            policy,
            concurrency=1,
            retries=1,
            timing=SessionTiming(pause_seconds=0.02),
        )
        episodes = await collect(collector, 8)
    assert {episode.status for episode in episodes} == {EpisodeStatus.DONE}
    assert lines_of(impostor, "resets.log") == []


async def test_a_server_with_one_session_serves_all_in_turn(serve: Serve) -> None:
    host = serve("Single")
    collector = RolloutCollector(address_of(host), go, concurrency=8, retries=0)
    episodes = await collect(collector, 16)
    assert {episode.status for episode in episodes} == {EpisodeStatus.DONE}
    assert collector.stats.retried.total() == 0


@pytest.mark.parametrize("address", ["ftp://here", "http://", ""])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(NoEnvironment):
        RolloutCollector(address, go)


async def test_cancelling_leaves_no_session_no_thread_and_no_task(serve: Serve) -> None:
    host = serve("Endless")
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    collector = RolloutCollector(address_of(host), go, concurrency=8, max_steps=None)
    collecting = asyncio.create_task(collect(collector, 8))
    await asyncio.to_thread(host.note_that, sessions=8)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    await asyncio.to_thread(host.note_that, sessions=0)
    assert asyncio.all_tasks() == tasks
    del collector, collecting
    gc.collect()  # threads for policies end with their collector
    pools = ("asyncio", "AnyIO")  # whose threads end with the loop's main task
    ours = {thread for thread in threading.enumerate() if not thread.name.startswith(pools)}
    for thread in ours - threads:
        await asyncio.to_thread(thread.join, 60)
    open_to = {
        c.raddr[1:2] for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"
    }
    assert (host.port,) not in open_to


async def test_finished_episodes_that_are_not_taken_hold_others_back(serve: Serve) -> None:
    host = serve()
    collector = RolloutCollector(
        address_of(host), lambda _: {"size": 50_000}, concurrency=4, buffer_bytes=500_000
    )
    taken = 0
    async for batch in collector.batches(1, episodes=30):
        assert batch[0].size_bytes > 200_000
        for _ in range(300):  # turns in which more would begin, were they allowed to
            await asyncio.sleep(0)
        taken += 1
        # Two wait to be taken, and four wait to join them.
        assert len(lines_of(host, "resets.log")) - taken <= 6
    assert taken == 30


async def test_an_abandoned_connection_logs_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    host = serve("Endless")
    collector = RolloutCollector(address_of(host), go, concurrency=8, max_steps=None)
    for turns in (1, 3, 10, 30, 100):
        collecting = asyncio.create_task(collect(collector, 8))
        for _ in range(turns):
            await asyncio.sleep(0)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    gc.collect()
    assert "never retrieved" not in caplog.text


# What others use is in `openenvd.rollouts`, and costs nothing until it is asked for.


def test_every_public_name_and_nothing_else_can_be_imported() -> None:
    assert "RolloutCollector" in dir(rollouts)
    for name in dir(rollouts):
        assert getattr(rollouts, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        _ = rollouts.Rollouts
    code = "import sys, openenvd.rollouts as r; print([n for n in sys.modules if r.__name__ in n])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['openenvd.rollouts']"
