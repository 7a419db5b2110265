# SPDX-License-Identifier: Apache-2.0
"""Episodes as OpenTelemetry traces, for a rollout that is given a tracer; no other imports this.

    episode ──┬─ reset
      │link   ├─ policy ─ step      of each step: what the policy took, what the environment took
      ▼       └─ …
    the span in which episodes are collected: a rollout's, or the caller's own

Each attempt at an episode is a trace of its own, so that a sampler decides for each; one that it
does not want is a plain `Attempt`, which costs nothing more. Its parts are as many as it has steps.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..system.access_tokens import without_token
from ..system.hidden_values import hide_secrets, secret_values
from ..tracing import HEADER, traceparent
from .answers import Answer
from .concurrency_limit import EpisodeRoom
from .episode_runner import Attempt, RunContext
from .episodes import Episode, episode_id
from .errors import EpisodeFailed
from .policies.policy import Encoded, Player, Turn
from .session_pool import EpisodeSession

_CANCELLED = "cancelled"
_MESSAGE_CHARACTERS = 500  # of what a span says of its failure
_READ_CHARACTERS = 4096  # of that, in which secrets are looked for


class EpisodeTraces:
    """Makes attempts at episodes, traced as far as the tracer's sampler wants them.

    Args:
        tracer: Begins the spans. Each episode has a link to the span in which this is made.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._secrets = secret_values({"env": dict(os.environ)})  # with the rollout's own
        carrier = {HEADER: traceparent() or ""}
        found = get_current_span(TraceContextTextMapPropagator().extract(carrier, Context()))
        collecting = found.get_span_context()
        self._links = [Link(collecting)] if collecting.is_valid else []

    def attempt(
        self, stage: RunContext, number: int, address: str, room: EpisodeRoom, attempt: int
    ) -> Attempt:
        """One attempt at an episode.

        Args:
            stage: State that all attempts of the rollout share.
            number: The episode's.
            address: The server.
            room: What the episode may hold.
            attempt: How manieth attempt at the episode it is, from 1.
        """
        attributes: dict[str, str | int] = {
            "openenvd.episode.id": episode_id(number),
            "openenvd.episode.attempt": attempt,
            "server.address": without_token(address)[0],
        }
        if (seed := stage.rules.seed_of(number)) is not None:
            attributes["openenvd.episode.seed"] = seed
        span = self._tracer.start_span(
            "episode", Context(), links=self._links, attributes=attributes
        )
        if not span.is_recording():
            return Attempt(stage, number, address, room)
        return _TracedAttempt(stage, number, address, room, self._tracer, span, self._secrets)


class _TracedAttempt(Attempt):
    """An attempt whose parts are spans."""

    def __init__(
        self,
        stage: RunContext,
        number: int,
        address: str,
        room: EpisodeRoom,
        tracer: Tracer,
        span: Span,
        secrets: Sequence[str],
    ) -> None:
        super().__init__(stage, number, address, room)
        self._tracer = tracer
        self._span = span
        token = without_token(address)[1]
        self._secrets = [*secrets, token] if token else secrets
        self._within = set_span_in_context(span, Context())

    async def run(self) -> Episode:
        try:
            episode = await super().run()
            self._span.set_attributes(_of_episode(episode))
            if episode.failure is not None:
                self._fail(self._span, episode.failure.reason.value, episode.failure.message)
            return episode
        except BaseException as exc:
            self._fail(self._span, *_kind_of(exc))
            raise
        finally:
            self._span.end()

    async def _reset(self, session: EpisodeSession) -> None:
        with self._part("reset", SpanKind.CLIENT):
            await super()._reset(session)

    async def _decided(self, player: Player, seen: Answer, turn: Turn) -> Encoded:
        with self._part("policy", SpanKind.INTERNAL, turn.number):
            return await super()._decided(player, seen, turn)

    async def _answered(self, session: EpisodeSession, decided: Encoded) -> Answer:
        with self._part("step", SpanKind.CLIENT, self._steps) as span:
            answer = await super()._answered(session, decided)
            span.set_attribute("openenvd.step.done", answer.done)
            if answer.reward is not None:
                span.set_attribute("openenvd.step.reward", answer.reward)
            return answer

    @contextmanager
    def _part(self, name: str, kind: SpanKind, step: int | None = None) -> Iterator[Span]:
        known = {} if step is None else {"openenvd.step.number": step}
        span = self._tracer.start_span(name, self._within, kind, attributes=known)
        try:
            yield span
        except BaseException as exc:
            self._fail(span, *_kind_of(exc))
            raise
        finally:
            span.end()

    def _fail(self, span: Span, kind: str, message: str) -> None:
        """Say why, in a line that has no secrets: traces are sent to others."""
        told = hide_secrets(message.partition("\n")[0][:_READ_CHARACTERS], self._secrets)
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, told[:_MESSAGE_CHARACTERS]))


def _of_episode(episode: Episode) -> dict[str, Any]:
    return {
        "openenvd.episode.status": episode.status.value,
        "openenvd.episode.reward": episode.total_reward,
    }


def _kind_of(exc: BaseException) -> tuple[str, str]:
    if isinstance(exc, EpisodeFailed):
        return exc.reason.value, str(exc)
    if isinstance(exc, asyncio.CancelledError):  # with the rollout, or at a time-out
        return _CANCELLED, ""
    return type(exc).__name__, str(exc)
