# SPDX-License-Identifier: Apache-2.0
"""The context of a trace (W3C `traceparent`), as it passes between processes and in HTTP heads."""

from __future__ import annotations

import os
import sys
from importlib import import_module

VARIABLE = "TRACEPARENT"  # OpenTelemetry's carrier between processes
HEADER = "traceparent"
_API = "opentelemetry.trace.propagation.tracecontext"


def traceparent() -> str | None:
    """Return the context of the code that calls: its OpenTelemetry span's, or TRACEPARENT.

    Where nothing has imported OpenTelemetry, no span of it is under way: the command line goes
    without it.
    """
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        import_module("opentelemetry.trace")  # another thread may be importing it still
        import_module(_API).TraceContextTextMapPropagator().inject(carrier)
    given = os.environ.get(VARIABLE, "")
    return carrier.get(HEADER) or (given if given.isascii() and given.isprintable() else "") or None
