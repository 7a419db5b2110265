# SPDX-License-Identifier: Apache-2.0
"""The daily cleanup of what lies beside the database and its logs; also run at the start.

    abandoned folders of sockets                        `runtime_dir.py`
    virtual environments that nothing has used lately   `environments.venv.cleanup`

What killed processes leave behind is swept more often: `sweep.py`.

Nothing depends on it or waits for it: a failure is logged, and tried again a day later. Requests
and logs are removed by the dispatcher's `Janitor`, which knows what runs.
"""

from __future__ import annotations

import asyncio
import logging

from ...environments.layout import socket_folders_outside
from ...environments.venv.cleanup import prune_old
from ...requests_db.async_store import AsyncStore
from ...requests_db.errors import DatabaseError
from ...requests_db.sql import queries
from ...system.units import MB
from ..settings import Paths, Settings
from .runtime_dir import collect_abandoned

EVERY_SECONDS = 86_400.0

log = logging.getLogger(__name__)


async def collect_daily(paths: Paths, settings: Settings, store: AsyncStore) -> None:
    """Clean up now and every day, until cancelled."""
    while True:
        try:
            run_seconds = await store.read(queries.run_seconds())
            await asyncio.to_thread(collect, paths, settings, run_seconds)
        except (OSError, DatabaseError, RuntimeError) as exc:  # the last: no room for a thread
            log.warning("the daily cleanup failed: %s", exc)
        await asyncio.sleep(EVERY_SECONDS)


def collect(paths: Paths, settings: Settings, run_seconds: float) -> None:
    """Clean up once, when daemons have run for so long; blocks.

    Raises:
        OSError: a folder cannot be read.
    """
    if gone := collect_abandoned(socket_folders_outside()):
        log.info("removed %d abandoned folders of sockets", len(gone))
    for venv in prune_old(paths, run_seconds, settings.keep_venv_days * EVERY_SECONDS):
        log.info(
            "removed the virtual environment of %s, unused for %g days: %.0f MB",
            venv.project or "an unfinished launch",
            settings.keep_venv_days,
            venv.freed_bytes / MB,
        )
