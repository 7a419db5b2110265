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
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from ..system.access_tokens import without_token
from ..system.hidden_values import hide_secrets, secret_values
from ..tracing.context import TraceContext
from .concurrency_limit import EpisodeRoom
from .episode_runner import Attempt, RunContext
from .episodes import Episode, episode_id
from .errors import EpisodeFailed
from .policies.policy import Encoded, Player, Turn
from .sessions.answers import Answer
from .sessions.session import Session

_CANCELLED = "cancelled"
_MESSAGE_CHARACTERS = 500  # of what a span says of its failure
_READ_CHARACTERS = 4096  # of that, in which secrets are looked for


class EpisodeTraces:
    """Makes attempts at episodes, traced as far as the tracer's sampler wants them.

    Args:
        tracer: Begins the spans.
        collecting: The span in which episodes are collected.
    """

    def __init__(self, tracer: Tracer, collecting: TraceContext | None = None) -> None:
        self._tracer = tracer
        self._secrets = secret_values({"env": dict(os.environ)})  # with the rollout's own
        self._links = [] if collecting is None else [Link(_span_context(collecting))]

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

    async def _reset(self, session: Session) -> None:
        began = time.time_ns()
        try:
            await super()._reset(session)
        except BaseException as exc:
            self._part("reset", began, SpanKind.CLIENT, {}, exc)
            raise
        self._part("reset", began, SpanKind.CLIENT, {})

    async def _decided(self, player: Player, seen: Answer, turn: Turn) -> Encoded:
        began, number = time.time_ns(), {"openenvd.step.number": turn.number}
        try:
            decided = await super()._decided(player, seen, turn)
        except BaseException as exc:
            self._part("policy", began, SpanKind.INTERNAL, number, exc)
            raise
        self._part("policy", began, SpanKind.INTERNAL, number)
        return decided

    async def _answered(self, session: Session, decided: Encoded) -> Answer:
        began, known = time.time_ns(), {"openenvd.step.number": self._steps}
        try:
            answer = await super()._answered(session, decided)
        except BaseException as exc:
            self._part("step", began, SpanKind.CLIENT, known, exc)
            raise
        more: dict[str, bool | float] = {"openenvd.step.done": answer.done}
        if answer.reward is not None:
            more["openenvd.step.reward"] = answer.reward
        self._part("step", began, SpanKind.CLIENT, known | more)
        return answer

    def _part(
        self,
        name: str,
        began: int,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        failed: BaseException | None = None,
    ) -> None:
        span = self._tracer.start_span(
            name, self._within, kind, attributes=attributes, start_time=began
        )
        if failed is not None:
            self._fail(span, *_kind_of(failed))
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


def _span_context(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags)
