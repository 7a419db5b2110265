# SPDX-License-Identifier: Apache-2.0
"""The daemon's own log: where it goes, and the form of its lines.

    text    2026-01-31 12:00:00,000 INFO    openenvd.server.daemon: openenvd N.N.N answers at …
    json    {"time": "2026-01-31T11:00:00+00:00", "level": "INFO", "logger": "…", "message": "…",
             "request_id": "…", "environment": "…"}: one object a line

In the background the daemon writes `daemon.log` itself, and keeps it short; in the foreground it
writes stderr. Uvicorn's records go to the same place.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from logging.handlers import RotatingFileHandler

from ..schema.settings import Paths, Settings
from ..system.text.units import MB

MAX_DAEMON_LOG_BYTES = 8 * MB


def set_up_log(paths: Paths, settings: Settings, *, in_background: bool) -> None:
    """Send every record of this process to the daemon's log."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if in_background:
        with contextlib.suppress(OSError):  # `daemon.run` refuses to start: it needs the folder too
            handler = RotatingFileHandler(
                paths.daemon_log, maxBytes=MAX_DAEMON_LOG_BYTES, backupCount=1
            )
    handler.setFormatter(_formatter(settings))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def _formatter(settings: Settings) -> logging.Formatter:
    if settings.log_format != "json":
        return logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    from pythonjsonlogger.core import RESERVED_ATTRS
    from pythonjsonlogger.orjson import OrjsonFormatter

    return OrjsonFormatter(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger"},
        reserved_attrs=[*RESERVED_ATTRS, "color_message"],  # uvicorn's, for terminals
        timestamp="time",
    )
