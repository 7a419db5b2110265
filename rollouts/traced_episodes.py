# SPDX-License-Identifier: Apache-2.0
"""Episodes as OpenTelemetry traces; only a rollout with a tracer imports this module.

    episode ──┬─ reset
      │link   ├─ policy ─ step      for each step: the time of the policy and of the environment
      ▼       └─ …
    the span in which episodes are collected: a rollout's, or the caller's own

Each attempt at an episode is a trace of its own, so that a sampler decides for each. An unsampled
attempt is a plain `Attempt` without further cost. A trace has two spans for each step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..system.net.access import without_token
from ..system.net.traceparent import HEADER, traceparent
from ..system.text.safe_text import hide_secrets, secret_values
from .answers import Answer
from .buffers import HoldStep
from .episode_runner import Attempt, RunContext
from .episodes import Episode, episode_id
from .errors import EpisodeFailed
from .policies.policy import Act, Encoded, Turn
from .session_pool import EpisodeSession

_MESSAGE_CHARACTERS = 500  # of a span's error
_READ_CHARACTERS = 4096  # of an error that are searched for secrets


class EpisodeTraces:
    """Makes attempts at episodes, with traces if the tracer's sampler wants them.

    Each episode has a link to the span in which this object was made.
    """

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._secrets = secret_values({"env": dict(os.environ)})  # including the rollout's own
        carrier = {HEADER: traceparent() or ""}
        found = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier, Context()))
        self._links = [trace.Link(found.get_span_context())]  # a link to no span is dropped

    def attempt(
        self, stage: RunContext, number: int, address: str, hold: HoldStep, attempt: int
    ) -> Attempt:
        """Make one attempt at an episode, with the arguments of `Attempt`."""
        server, token = without_token(address)
        known: dict[str, str | int] = {
            "openenvd.episode.id": episode_id(number),
            "openenvd.episode.attempt": attempt,
            "server.address": server,
        }
        if (seed := stage.seed_of(number)) is not None:
            known["openenvd.episode.seed"] = seed
        span = self._tracer.start_span("episode", Context(), links=self._links, attributes=known)
        if not span.is_recording():
            return Attempt(stage, number, address, hold, attempt)
        made = _TracedAttempt(stage, number, address, hold, attempt)
        made.tracer, made.span = self._tracer, span
        made.secrets = [*self._secrets, token] if token else self._secrets
        return made


class _TracedAttempt(Attempt):
    """An attempt whose parts are spans."""

    tracer: trace.Tracer
    span: trace.Span
    secrets: list[str]

    async def run(self) -> Episode:
        with self._within(self.span):
            episode = await super().run()
            self.span.set_attribute("openenvd.episode.status", episode.status.value)
            self.span.set_attribute("openenvd.episode.reward", episode.total_reward)
            if episode.failure is not None:
                self._fail(self.span, episode.failure.reason.value, episode.failure.message)
            return episode

    async def _reset(self, session: EpisodeSession) -> None:
        with self._part("reset", trace.SpanKind.CLIENT):
            await super()._reset(session)

    async def _decided(self, act: Act, seen: Answer, turn: Turn) -> Encoded:
        with self._part("policy", trace.SpanKind.INTERNAL, turn.number):
            return await super()._decided(act, seen, turn)

    async def _answered(self, session: EpisodeSession, decided: Encoded) -> Answer:
        with self._part("step", trace.SpanKind.CLIENT, self._steps) as span:
            answer = await super()._answered(session, decided)
            if answer.reward is not None:
                span.set_attribute("openenvd.step.reward", answer.reward)
            return answer

    def _part(
        self, name: str, kind: trace.SpanKind, step: int | None = None
    ) -> AbstractContextManager[trace.Span]:
        known = {} if step is None else {"openenvd.step.number": step}
        return self._within(self.tracer.start_span(name, kind=kind, attributes=known))

    @contextmanager
    def _within(self, span: trace.Span) -> Iterator[trace.Span]:
        """Make the span the current one until the block ends; `_fail` records a failure."""
        with trace.use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                yield span
            except EpisodeFailed as exc:
                self._fail(span, exc.reason.value, str(exc))
                raise
            except BaseException as exc:  # `CancelledError` with the rollout, or at a time-out
                self._fail(span, type(exc).__name__, str(exc))
                raise

    def _fail(self, span: trace.Span, kind: str, message: str) -> None:
        """Record the error in a line without secrets, because traces leave the machine."""
        text = hide_secrets(message.partition("\n")[0][:_READ_CHARACTERS], self.secrets)
        span.set_attribute("error.type", kind)
        span.set_status(trace.Status(trace.StatusCode.ERROR, text[:_MESSAGE_CHARACTERS]))
