# SPDX-License-Identifier: Apache-2.0
"""Episodes as traces, of real env hosts and a real tracer."""

import contextlib
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from openenvd.rollouts.collector import RolloutCollector
from openenvd.rollouts.episode_runner import Attempt
from openenvd.rollouts.episodes import Episode

from ..server.tracing.conftest import KeptSpans, attributes_of, ids_of
from ..server.tracing.conftest import kept as kept
from .conftest import Serve, address_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def go(observation: dict[str, Any]) -> dict[str, Any]:
    return {"what": "go"}


def fail(observation: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no idea")


async def play(kept: KeptSpans, address: str, policy: Any, episodes: int = 3) -> list[Episode]:
    collector = RolloutCollector(
        address, policy, concurrency=2, seed=100, retries=1, tracer=kept.tracer
    )
    async with contextlib.aclosing(collector.batches(episodes, episodes=episodes)) as batches:
        async for batch in batches:
            return batch
    return []


async def test_each_episode_is_a_trace_of_its_reset_and_steps(
    serve: Serve, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{SPAN}-01")
    await play(kept, address_of(serve()), go)
    episodes = kept.named("episode")
    assert len({ids_of(span)[0] for span in episodes}) == 3
    for episode in episodes:
        trace_id, span_id, parent = ids_of(episode)
        assert parent is None
        assert [link.context.span_id for link in episode.links] == [int(SPAN, 16)]
        parts = [span for span in kept.all if ids_of(span)[2] == span_id]
        assert [part.name for part in parts] == ["reset", *["policy", "step"] * 5]
        assert {ids_of(part)[0] for part in parts} == {trace_id}
        steps = [attributes_of(part) for part in parts if part.name == "step"]
        assert [step["openenvd.step.number"] for step in steps] == [0, 1, 2, 3, 4]
        assert [step["openenvd.step.reward"] for step in steps] == [1, 2, 3, 4, 5]
        told = attributes_of(episode)
        assert told["openenvd.episode.reward"] == 15
        assert told["openenvd.episode.status"] == "done"
        assert told["openenvd.episode.seed"] == 100 + int(told["openenvd.episode.id"])


async def test_an_episode_that_fails_says_what_of_it_did(serve: Serve, kept: KeptSpans) -> None:
    await play(kept, address_of(serve()), fail, episodes=1)
    episodes, policies = kept.named("episode"), kept.named("policy")
    attempts = [attributes_of(span)["openenvd.episode.attempt"] for span in episodes]
    assert attempts == [1, 2][: len(attempts)]
    for span in (*episodes, *policies):
        assert not span.status.is_ok
        assert attributes_of(span)["error.type"] == "policy_error"
        assert str(span.status.description).startswith("RuntimeError: no idea (")
    assert not kept.named("step")


@pytest.mark.parametrize("is_async", [True, False])
async def test_spans_that_a_policy_makes_are_below_its_own(
    serve: Serve, kept: KeptSpans, is_async: bool
) -> None:

    def ask(observation: dict[str, Any]) -> dict[str, Any]:
        with kept.tracer.start_as_current_span("model"):
            return go(observation)

    async def ask_later(observation: dict[str, Any]) -> dict[str, Any]:
        return ask(observation)

    await play(kept, address_of(serve()), ask_later if is_async else ask, episodes=1)
    policies = {ids_of(span)[1] for span in kept.named("policy")}
    assert {ids_of(span)[2] for span in kept.named("model")} == policies


def leak(observation: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError(f"https://me:hunter2@host/ says no to open-sesame{'!' * 9999}\nin {TRACE}")


async def test_what_a_failure_says_is_a_bounded_line_without_secrets(
    serve: Serve, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_API_KEY", "open-sesame")
    await play(kept, address_of(serve()), leak, episodes=1)
    for span in (*kept.named("episode"), *kept.named("policy")):
        told = span.status.description or ""
        assert told.startswith("RuntimeError: https://***@host/ says no to ***!")
        assert len(told) == 500


async def test_episodes_that_the_sampler_does_not_want_are_plain(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[type[Attempt]] = []
    plain = Attempt.__init__

    def noted(self: Attempt, *given: Any) -> None:
        made.append(type(self))
        plain(self, *given)

    monkeypatch.setattr(Attempt, "__init__", noted)
    unwanted = KeptSpans(ALWAYS_OFF)
    await play(unwanted, address_of(serve()), go)
    assert made == [Attempt] * 3
    assert unwanted.all == []
    unwanted.provider.shutdown()
