# SPDX-License-Identifier: Apache-2.0
"""A tracer whose spans are kept instead of sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    spans = KeptSpans()
    yield spans
    spans.provider.shutdown()


class KeptSpans:
    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler or ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("openenvd")

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [found] = self.named(name)
        return found


def ids_of(span: ReadableSpan) -> tuple[str, str, str | None]:
    """The span's trace, itself, and its parent."""
    context, parent = span.context, span.parent
    assert context is not None
    above = None if parent is None else f"{parent.span_id:016x}"
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", above


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
