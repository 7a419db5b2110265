# SPDX-License-Identifier: Apache-2.0
"""A tracer whose spans are kept instead of sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .kept_spans import KeptSpans


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    """A tracer of the SDK's, and what it has ended."""
    spans = KeptSpans()
    yield spans
    spans.provider.shutdown()
