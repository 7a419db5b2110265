# SPDX-License-Identifier: Apache-2.0
"""Trace contexts as W3C's `traceparent` spells them: `00-<trace id>-<span id>-<flags>`.

Standard library alone: the command line imports it.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

VARIABLE = "TRACEPARENT"  # OpenTelemetry's carrier between processes
HEADER = "traceparent"

_FORM = re.compile(
    r"(?P<version>[0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?P<more>-.*)?"
)
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Which trace, and which span of it, something belongs to."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str | None) -> TraceContext | None:
        """Read a `traceparent`; None of what is none, as W3C demands."""
        found = _FORM.fullmatch(text.strip()) if text else None
        if (
            found is None
            or found["version"] == "ff"
            or (found["version"] == "00" and found["more"])
        ):
            return None
        _, trace_id, span_id, flags, _ = found.groups()
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self, key: str) -> TraceContext:
        """The context of a span of this trace, whose id follows from this one's and the key."""
        span_id = sha256(f"{self.span_id}/{key}".encode()).hexdigest()[:16]
        return TraceContext(self.trace_id, span_id, self.is_sampled)


def current() -> TraceContext | None:
    """The context of the code that calls: its OpenTelemetry span, or what TRACEPARENT says.

    Imports nothing: where nothing has imported OpenTelemetry, no span of it is under way.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    current_span = getattr(api, "get_current_span", None)  # another thread may be importing it
    if current_span is not None:
        span = current_span().get_span_context()
        if span.is_valid:
            return TraceContext(
                f"{span.trace_id:032x}", f"{span.span_id:016x}", span.trace_flags.sampled
            )
    return TraceContext.parse(os.environ.get(VARIABLE))
