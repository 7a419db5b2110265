# SPDX-License-Identifier: Apache-2.0
"""The context of a trace (W3C `traceparent`), which passes between processes and in HTTP heads."""

from __future__ import annotations

import os
import sys
from importlib import import_module

VARIABLE = "TRACEPARENT"  # OpenTelemetry's carrier between processes
HEADER = "traceparent"
_API = "opentelemetry.trace.propagation.tracecontext"


def traceparent() -> str | None:
    """Return the caller's context: its OpenTelemetry span's, or TRACEPARENT.

    Without an import of OpenTelemetry there is no span, so the command line does not import it.
    """
    carrier: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        import_module("opentelemetry.trace")  # another thread may still be importing it
        import_module(_API).TraceContextTextMapPropagator().inject(carrier)
    given = os.environ.get(VARIABLE, "")
    return carrier.get(HEADER) or (given if given.isascii() and given.isprintable() else "") or None
